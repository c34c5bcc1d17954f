"""bench/grid.py without a GPU: the order of the work, going on with a file, and what each shape is measured with.
Timing functions are stand-ins."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import ahead, common, grid, variants  # noqa: E402
from bench.case import Case  # noqa: E402

CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.1, "gemm_tflop_s": 800.0}
SMALL = ["--widths", "16,32", "24,40", "--tokens", "1", "2", "16", "--variants", "eager", "fused"]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls every variant once on each set; the log holds (metric, shapes of the outputs, variants)."""
    log: list[tuple[Any, ...]] = []

    def timer(metric: str) -> Any:
        def measure(calls: dict[str, common.Call], sets: int, rounds: int) -> dict[str, list[float]]:
            out = [calls[v](i) for v in calls for i in range(sets)]
            log.append((metric, {tuple(y.shape) for y in out if y is not None}, list(calls)))
            return {v: [100.0, 101.0, 99.0] for v in calls}

        return measure

    for metric in ("graph_us", "kernel_us"):
        monkeypatch.setattr(common, metric, timer(metric))
    monkeypatch.setattr(common, "GRAPHS_UP_TO", 2)
    return log


@pytest.fixture
def limits() -> Iterator[None]:
    """Gives the compiler's limits back that a run raises."""
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in names}):
        yield


def make(tmp_path: Path, *arguments: str, rows: Any = ()) -> grid.Grid:
    args = grid.parser().parse_args([*SMALL, *arguments])

    def save(found: list[dict[str, Any]]) -> None:
        common.write(common.result("grid", found, CEILINGS, "NVIDIA H200"), tmp_path / "grid.json")

    return grid.Grid(args, save, rows, device="cpu", sets=2)


# ------------------------------------------------------------------------------------------ order


def test_the_grid_is_that_of_the_table() -> None:
    assert len(grid.WIDTHS) == 13 and grid.TOKENS == (
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
        2048,
        4096,
        8192,
        16384,
    )
    cells = Counter((op, t, width) for op, width, some in grid.visits(grid.parser().parse_args([])) for t in some)
    assert len(cells) == 2 * 13 * 15 and set(cells.values()) == {1}


def test_a_run_that_ends_early_covers_the_grid_evenly() -> None:
    order = [(t, width) for _, width, some in grid.visits(grid.parser().parse_args(["--op", "geglu"])) for t in some]
    assert {t for t, _ in order[: 13 * 6]} == set(grid.FIRST)
    assert all(Counter(order[: 13 * 6])[t, width] == 1 for t in grid.FIRST for width in grid.WIDTHS)
    assert {t for t, _ in order[: 13 * 4]} == {1, 16, 128, 1024}  # graphs before the profiler
    few = grid.parser().parse_args(["--tokens", "8192", "1", "--widths", "8,16", "--op", "geglu"])
    assert list(grid.visits(few)) == [("geglu", (8, 16), [1]), ("geglu", (8, 16), [8192])]


@pytest.mark.parametrize(
    "arguments",
    [["--widths", "768"], ["--widths", "0,3"], ["--tokens", "0"], ["--tokens", "x"], ["--dtype", "float32"]],
)
def test_unknown_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        grid.parser().parse_args(arguments)


# ------------------------------------------------------------------------------------------ runs


def test_a_run_measures_every_cell_once(tmp_path: Path, timed: list[tuple[Any, ...]]) -> None:
    run = make(tmp_path, "--dtype", "float16")
    run.all()
    assert not run.raised and not run.unmeasured
    rows = common.load(tmp_path / "grid.json")["rows"]
    assert rows == run.rows
    cells = Counter((*grid.cell_of(r), r["variant"]) for r in rows)
    wanted = {
        (op, p, t, *width, "float16", "graph_us" if t <= 2 else "kernel_us", v)
        for op in ("geglu", "mlp_relu")
        for p in ("forward", "step")
        for t in (1, 2, 16)
        for width in ((16, 32), (24, 40))
        for v in ("eager", "fused")
    }
    assert set(cells) == wanted and set(cells.values()) == {1}
    assert {r["bias"] for r in rows if r["op"] == "mlp_relu"} == {True}
    for row, (metric, shapes, names) in zip(rows[::4], timed[::2], strict=True):  # forwards: two rows, then the step
        assert (metric, shapes, names) == (row["metric"], {(row["tokens"], row["hidden"])}, ["eager", "fused"])


def test_a_run_goes_on_with_what_is_there(tmp_path: Path, timed: list[tuple[Any, ...]]) -> None:
    whole = make(tmp_path)
    whole.all()
    lost = [r for r in whole.rows if not (r["tokens"] == 16 and r["pass"] == "step" and r["op"] == "geglu")]
    again = make(tmp_path, rows=lost)
    timed.clear()
    again.all()
    assert len(timed) == 2  # two widths
    assert {grid.cell_of(r) for r in again.rows} == {grid.cell_of(r) for r in whole.rows}
    more = make(tmp_path, "--variants", "eager", "fused", "compile_max", rows=whole.rows)
    assert more.todo("geglu", (16, 32), [1, 16]) == {1: ["forward", "step"], 16: ["forward", "step"]}
    assert whole.todo("geglu", (16, 32), [1, 16]) == {}
    assert make(tmp_path, "--dtype", "float16", rows=whole.rows).todo("geglu", (16, 32), [1])


def test_a_cell_of_fewer_variants_is_replaced(tmp_path: Path, timed: list[tuple[Any, ...]]) -> None:
    alone = make(tmp_path, "--variants", "eager")
    alone.all()
    both = make(tmp_path, rows=alone.rows)
    both.all()
    cells = Counter((*grid.cell_of(r), r["variant"]) for r in both.rows)
    assert set(cells.values()) == {1} and len(cells) == 2 * len(alone.rows)


def test_earlier_rows_are_taken_from_the_same_commit_and_machine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    rows = [common.row("geglu", "step", (1, 2, 3), "eager", "graph_us", [1.0])]
    now = common.result("grid", rows, CEILINGS, "NVIDIA H200")
    path = tmp_path / "grid.json"
    assert grid.earlier(path, now) == ([], "")
    common.write(now, path)
    assert grid.earlier(path, now) == (rows, f"{path}: going on after 1 rows")
    for change in ({"commit": "def"}, {"gpu": "NVIDIA H100"}, {"torch": "2.9"}):
        found, said = grid.earlier(path, {**now, **change})
        assert not found and "measured anew" in said and str(now[next(iter(change))]) in said
    for commit in ("unknown", "abc-dirty"):
        common.write({**now, "commit": commit}, path)
        assert grid.earlier(path, {**now, "commit": commit})[0] == []
    path.write_text("{")
    assert "cannot be read" in grid.earlier(path, now)[1]


def test_what_did_not_fit_is_named(tmp_path: Path, timed: list[tuple[Any, ...]], monkeypatch) -> None:
    run = make(tmp_path, "--op", "geglu", "--minutes", "1")
    monkeypatch.setattr(run, "seconds", lambda: 20.0 * len({grid.cell_of(r) for r in run.rows}))
    run.all()
    # Tokens 1 and 16 come first, those of a graph before those of the profiler: both widths at 1 token, and no more.
    assert {(r["tokens"], r["hidden"]) for r in run.rows} == {(1, 16), (1, 24)}
    assert run.unmeasured == [f"geglu {t}x{w}" for t in (16, 2) for w in ("16x32", "24x40")]
    assert "not measured in the 1 minutes: geglu 16x16x32" in run.report()
    assert common.load(tmp_path / "grid.json")["rows"] == run.rows


def test_a_variant_that_raises_is_named_and_the_others_go_on(tmp_path: Path, timed: Any, monkeypatch) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no kernel for this shape")

    monkeypatch.setitem(
        variants.VARIANTS, "compile", variants.Variant(lambda op, eager: variants._shared(Broken(), eager))
    )
    run = make(tmp_path, "--variants", "eager", "compile", "fused", "--op", "geglu")
    run.all()
    assert "raised: compile, geglu 1x16x32 forward, warm-up: RuntimeError: no kernel for this shape" in run.report()
    assert {r["variant"] for r in run.rows} == {"eager", "fused"} and len(run.rows) == 2 * 2 * 3 * 2


def test_liger_is_left_out_where_it_is_missing_and_for_two_layers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    run = make(tmp_path, "--variants", "eager", "liger")
    assert run.offered("geglu") == ["eager"] and "left out: liger: liger-kernel is not installed" in run.report()
    monkeypatch.setattr(grid, "missing", lambda name: None)
    run = make(tmp_path, "--variants", "eager", "liger")
    assert run.offered("geglu") == ["eager", "liger"] and run.offered("mlp_relu") == ["eager"]


# ------------------------------------------------------------------------------------------ cases and the compiler


@pytest.mark.parametrize("op", ["geglu", "mlp_relu"])
def test_a_case_with_fewer_tokens_shares_its_modules(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Case(op, (48, 64, 96), "cpu", sets=3)
    for name in ("eager", "fused"):
        whole.add(name)
    part = whole.at(16, 2)
    assert part.shape == (16, 64, 96) and part.sets == len(part.x) == 2
    assert part.eager == whole.eager[:2] and part.x[0].is_leaf and part.x[0].grad is None
    y, y_whole = (case.forward("fused")(1) for case in (part, whole))
    assert y.shape == (16, 64)
    torch.testing.assert_close(y, y_whole[:16], atol=1e-2, rtol=1e-2)
    part.step("fused")(1)
    assert part.x[1].grad is None and all(p.grad is None for p in whole.eager[1].parameters())
    assert max(part.errors("fused").values()) < 1.2e-2
    monkeypatch.setattr(
        common, "input_sets", lambda size: 2 if size == 2 * (2 * 8 * 64 + (3 if op == "geglu" else 2) * 6144) else 9
    )
    assert whole.at(8).sets == 2 and whole.at(16).sets == 3
    for wrong in ((49, 1), (16, 4)):
        with pytest.raises(common.BenchError, match="has no"):
            whole.at(*wrong)


def test_compile_makes_one_graph_a_shape_and_pass_for_all_sets(monkeypatch: pytest.MonkeyPatch, limits: None) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **options: real(m, backend="aot_eager", **options))
    grid.let_compile_specialise()
    whole = Case("geglu", (12, 16, 24), "cpu", sets=3)
    whole.add("compile")
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    for tokens in range(1, 12):  # more than the limit that torch has by itself
        part = whole.at(tokens, 3)
        for call in (part.forward("compile"), part.step("compile")):
            for i in range(3):
                call(i)
    assert counters["stats"]["unique_graphs"] - before == 2 * 11


def test_first_calls_run_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.Size, torch.dtype, bool]] = []

    def build(op: str, eager: nn.Module) -> variants.Built:
        def run(x: Tensor) -> Tensor:
            seen.append((op, x.shape, x.dtype, torch.is_grad_enabled()))
            return eager(x)

        return variants._shared(run, eager)

    monkeypatch.setitem(variants.VARIANTS, "compile", variants.Variant(build))
    ahead.first_calls("mlp_relu", (5, 16, 24), ["eager", "compile"], "float16", "cpu")
    assert seen == [("mlp_relu", torch.Size([5, 16]), torch.float16, grad) for grad in (False, True)]


def test_only_what_compiles_and_is_missing_is_compiled_ahead(tmp_path: Path, timed: Any, monkeypatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ahead, "run", lambda tasks, jobs, seconds: told.append((tasks, jobs)))
    done = make(tmp_path, "--tokens", "1", "--op", "geglu")
    done.all()
    args = [*SMALL, "--variants", "eager", "fused", "--op", "geglu", "--jobs", "5", "--tokens", "1", "2"]
    run = make(tmp_path, *args[len(SMALL) :], rows=done.rows)
    grid.compile_ahead(run.args, run)
    wanted = [(ahead.first_calls, ("geglu", (2, *width), ["fused"], "bfloat16")) for width in ((16, 32), (24, 40))]
    assert told == [(wanted, 5)]


def test_the_command(
    tmp_path: Path, timed: Any, limits: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = grid.Grid
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr(common, "need_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(common, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(grid, "Grid", lambda args, save, rows: real(args, save, rows, "cpu", 2))
    out = tmp_path / "deep" / "grid.json"
    assert grid.main([*SMALL, "--out", str(out)]) == 0
    content = common.load(out)
    assert content["bench"] == "grid" and content["ceilings"] == CEILINGS and len(content["rows"]) == 48
    timed.clear()
    assert grid.main([*SMALL, "--out", str(out)]) == 0 and not timed
    assert "going on after 48 rows" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert grid.main(["--out", str(tmp_path / "x.json")]) == 2


def test_files_of_one_commit_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def file(name: str, tokens: int, **other: Any) -> str:
        row = common.row("geglu", "forward", (tokens, 16, 32), "eager", "graph_us", [1.0, 2.0])
        content = {**common.result("grid", [row], CEILINGS, "NVIDIA H200"), **other}
        return str(common.write(content, tmp_path / name))

    files = [file("a.json", 1), file("b.json", 2), file("c.json", 2)]
    assert grid.main(["--merge", *files, "--out", str(tmp_path / "all.json")]) == 0
    assert [r["tokens"] for r in common.load(tmp_path / "all.json")["rows"]] == [1, 2]
    other = file("d.json", 4, commit="other")
    assert grid.main(["--merge", files[0], other, "--out", str(tmp_path / "no.json")]) == 1
    assert "differ in commit" in capsys.readouterr().err
    assert not (tmp_path / "no.json").exists()
