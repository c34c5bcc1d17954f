"""bench/peers.py without a GPU: arguments, and what a run measures, names and writes. Timing functions are
stand-ins here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import ahead, common, peers, variants  # noqa: E402
from bench.rehearsal import Verdict  # noqa: E402

CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.1, "gemm_tflop_s": 800.0}
SMALL = (48, 64, 96)
TINY = (16, 64, 96)


def always(name: str, op: str, shape: tuple[int, int, int]) -> Verdict:
    return Verdict(True)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Timing functions that call each variant once and say 100 us; the log holds (metric, variants)."""
    log: list[tuple[str, list[str]]] = []

    def timer(metric: str) -> Callable[..., Any]:
        def measure(calls: dict[str, common.Call], sets: int, *rounds: int) -> dict[str, list[float]]:
            log.append((metric, list(calls)))
            for call in calls.values():
                call(sets - 1)
            return {v: [100.0, 101.0, 99.0] for v in calls}

        return measure

    for metric in common.TIMES:
        monkeypatch.setattr(common, metric, timer(metric))
    for metric in ("peak_bytes", "saved_bytes", "kernels"):
        monkeypatch.setattr(common, metric, lambda call: [float(call(0) is not None)])
    return log


def make(tmp_path: Path, *arguments: str, rehearsal: Any = always) -> peers.Run:
    args = peers.parser().parse_args(["--shapes", "48x64x96,16x64x96", *arguments])

    def save(rows: list[dict[str, Any]]) -> None:
        common.write(common.result("peers", rows, CEILINGS, "NVIDIA H200"), tmp_path / "peers.json")

    return peers.Run(args, rehearsal, save, device="cpu", sets=2)


# ------------------------------------------------------------------------------------------ arguments


def test_shapes_are_read() -> None:
    assert peers.parse_shapes("8192x768x3072,128x768x3072") == [(8192, 768, 3072), (128, 768, 3072)]
    assert peers.parse_shape(" 1x2x3 ") == (1, 2, 3)


@pytest.mark.parametrize("text", ["8192x768", "8192x768x3072x2", "axbxc", "", "8192,768,3072", "0x768x3072"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        peers.parse_shape(text)
    with pytest.raises(SystemExit):
        peers.parser().parse_args(["--shapes", text])


def test_jobs_are_in_order_of_importance() -> None:
    found = peers.jobs(peers.parser().parse_args([]))
    assert found[0] == ("geglu", (8192, 768, 3072))
    assert [op for op, _ in found] == ["geglu"] * 6 + ["mlp_relu"] * 2 + ["swiglu"] * 2
    quick = peers.jobs(peers.parser().parse_args(["--quick", "--op", "swiglu", "geglu"]))
    assert quick == [("swiglu", (8192, 768, 3072)), ("geglu", (8192, 768, 3072))]
    own = peers.jobs(peers.parser().parse_args(["--op", "geglu", "--shapes", "1x2x3,4x5x6"]))
    assert own == [("geglu", (1, 2, 3)), ("geglu", (4, 5, 6))]


@pytest.mark.parametrize("arguments", [["--variants", "cutlass"], ["--metrics", "host_us"], ["--op", "relu"]])
def test_unknown_names_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parser().parse_args(arguments)


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ runs


def test_a_run_measures_all_and_the_clock_comes_before_the_profiler(
    tmp_path: Path, stand_ins: list[tuple[str, list[str]]]
) -> None:
    run = make(tmp_path, "--op", "geglu", "mlp_relu", "--variants", "eager", "fused")
    run.all()
    assert not run.raised and not run.left_out and not run.unmeasured
    content = common.load(tmp_path / "peers.json")
    assert content["rows"] == run.rows
    cells = {(r["op"], r["pass"], r["tokens"], r["variant"], r["metric"]) for r in run.rows}
    assert len(cells) == len(run.rows)
    for op in ("geglu", "mlp_relu"):
        for variant in ("eager", "fused"):
            for tokens in (48, 16):
                for metric in ("wall_us", "graph_us", "peak_bytes", "kernels", "kernel_us"):
                    assert {(op, p, tokens, variant, metric) for p in ("forward", "step")} <= cells
                assert (op, "step", tokens, variant, "saved_bytes") in cells
                assert (op, "forward", tokens, variant, "saved_bytes") not in cells
            assert (op, "step", 16, variant, "rel_error") in cells
            assert (op, "step", 48, variant, "rel_error") not in cells  # at the smallest shape alone
    assert {r["bias"] for r in run.rows if r["op"] == "mlp_relu"} == {True}
    assert {r["bias"] for r in run.rows if r["op"] == "geglu"} == {False}
    order = [metric for metric, _ in stand_ins]
    assert max(i for i, m in enumerate(order) if m == "wall_us") < order.index("kernel_us")
    assert "raised" not in run.table() and "left out" not in run.table()


def test_missing_peers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any) -> None:
    for package in ("liger_kernel", "quack", "flash_swiglu_mlp"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    chosen = ["eager", "liger", "quack", "flash_swiglu", "fused"]
    run = make(tmp_path, "--op", "geglu", "--metrics", "wall_us", "--variants", *chosen)
    run.all()
    text = run.table()
    for name, package in (("liger", "liger-kernel"), ("quack", "quack-kernels"), ("flash_swiglu", "flash-swiglu-mlp")):
        assert f"left out: {name}: {package} is not installed" in text
    assert not run.raised
    assert {r["variant"] for r in run.rows} == {"eager", "fused"}


def test_why_a_peer_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flash_swiglu_mlp.py").write_text("import a_package_that_is_not_there")
    assert variants.missing("flash_swiglu") == (
        "flash-swiglu-mlp is installed, but needs a_package_that_is_not_there, which is not"
    )
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text("raise RuntimeError('no site-packages in the path')")
    assert variants.missing("quack") == (
        "quack-kernels is installed, but importing it raises RuntimeError: no site-packages in the path"
    )
    assert variants.missing("eager") is None


def test_an_operation_that_a_peer_has_not_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins) -> None:
    monkeypatch.setattr(peers, "missing", lambda name: None)
    run = make(tmp_path, "--op", "geglu", "--metrics", "wall_us", "--variants", "eager", "flash_swiglu")
    run.all()
    assert "left out: flash_swiglu, geglu: has swiglu only, not geglu" in run.table()
    assert not run.raised


class Broken(nn.Module):
    """Raises once it has been called often enough."""

    def __init__(self, eager: nn.Module, after: int) -> None:
        super().__init__()
        self.eager, self.after = eager, after

    def forward(self, x: Tensor) -> Tensor:
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("no kernel\nfor this shape")
        return self.eager(x)


@pytest.mark.parametrize("after, where", [(0, "warm-up"), (2, "wall_us")])
def test_a_variant_that_raises_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any, after: int, where: str
) -> None:
    def build(op: str, eager: nn.Module) -> variants.Built:
        return variants._shared(Broken(eager, after), eager)

    monkeypatch.setitem(variants.VARIANTS, "compile", variants.Variant(build))
    run = make(tmp_path, "--op", "geglu", "--metrics", "wall_us", "--variants", "eager", "compile", "fused")
    run.all()
    text = run.table()
    assert f"raised: compile, geglu 48x64x96 forward, {where}: RuntimeError: no kernel" in text
    assert all(name.startswith("compile") for name in run.raised)
    for other in ("eager", "fused"):
        assert len([r for r in run.rows if r["variant"] == other]) == 4  # two shapes, two passes
    cell = next(line for line in text.splitlines() if "48x64x96 forward" in line)
    assert "raised" in cell and cell.count("100") == 2
    common.load(tmp_path / "peers.json")


def test_a_build_that_raises_and_a_metric_that_takes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any
) -> None:
    def build(op: str, eager: nn.Module) -> variants.Built:
        raise TypeError("unknown argument")

    def graph_us(calls: dict[str, common.Call], sets: int, rounds: int) -> dict[str, list[float]]:
        if len(calls) > 1:
            raise MemoryError("out of memory")
        return {v: [1.0] for v in calls}

    monkeypatch.setitem(variants.VARIANTS, "compile", variants.Variant(build))
    monkeypatch.setattr(common, "graph_us", graph_us)
    run = make(tmp_path, "--op", "swiglu", "--metrics", "graph_us", "wall_us")
    run.present = ["eager", "compile", "fused"]
    run.all()
    assert run.raised["compile, swiglu 48x64x96, build"] == "TypeError: unknown argument"
    assert run.raised["eager, swiglu 16x64x96 step, graph_us"] == "MemoryError: out of memory"
    assert {(r["variant"], r["metric"]) for r in run.rows} == {("eager", "wall_us"), ("fused", "wall_us")}


def test_the_exit_code_says_that_a_variant_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    real = peers.Run
    monkeypatch.setattr(common, "need_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(common, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(peers, "Run", lambda args, rehearsal, save: real(args, always, save, "cpu", 2))
    out = tmp_path / "deep" / "mine.json"
    arguments = ["--op", "geglu", "--shapes", "16x64x96", "--metrics", "wall_us", "--out", str(out), "--variants"]
    assert peers.main([*arguments, "eager", "fused"]) == 0
    assert "written: " in capsys.readouterr().out and common.load(out)["bench"] == "peers"

    def build(op: str, eager: nn.Module) -> variants.Built:
        return variants._shared(Broken(eager, 0), eager)

    monkeypatch.setitem(variants.VARIANTS, "compile", variants.Variant(build))
    assert peers.main([*arguments, "eager", "compile"]) == 1
    assert peers.main([*arguments, "compile"]) == 1  # and nothing was measured


def test_a_run_that_is_killed_leaves_a_valid_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any
) -> None:
    run = make(tmp_path, "--op", "geglu", "--metrics", "wall_us", "--variants", "eager")
    first = common.wall_us

    def once(calls: dict[str, common.Call], *rest: int) -> dict[str, list[float]]:
        if len(run.rows) == 2:
            raise KeyboardInterrupt
        return first(calls, *rest)

    monkeypatch.setattr(common, "wall_us", once)
    with pytest.raises(KeyboardInterrupt):
        run.all()
    assert [r["tokens"] for r in common.load(tmp_path / "peers.json")["rows"]] == [48, 48]


def test_a_write_that_breaks_off_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [common.row("geglu", "step", SMALL, "eager", "wall_us", [1.0])]
    content = common.result("peers", rows, CEILINGS, "NVIDIA H200")
    path = common.write(content, tmp_path / "x.json")
    real = Path.write_text

    def half(self: Path, text: str, **options: Any) -> int:
        real(self, text[: len(text) // 2], **options)
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        common.write(content, path)
    assert common.load(path) == content


def test_what_did_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any) -> None:
    """A clock on which every row takes 10 seconds; one minute has room for part of the work."""
    run = make(tmp_path, "--op", "geglu", "--variants", "eager", "--minutes", "1", "--metrics", "wall_us", "kernel_us")
    monkeypatch.setattr(run, "seconds", lambda: 10.0 * len(run.rows))
    run.all()
    # By the clock until 39 s: the first shape's two rows and the second's two; then the profiler until 60 s.
    assert [(r["tokens"], r["metric"]) for r in run.rows] == [(48, "wall_us")] * 2 + [(16, "wall_us")] * 2 + [
        (48, "kernel_us")
    ] * 2 + [(16, "kernel_us")]
    assert run.unmeasured == ["geglu 16x64x96 step: kernel_us"]
    assert "not measured in the 1 minutes: geglu 16x64x96 step: kernel_us" in run.table()
    clock = make(tmp_path, "--op", "geglu", "--variants", "eager", "--minutes", "1", "--metrics", "wall_us")
    monkeypatch.setattr(clock, "seconds", lambda: 15.0 * len(clock.rows))
    clock.all()  # nothing comes after the clock, so it has the whole minute
    assert len(clock.rows) == 4 and not clock.unmeasured
    late = make(tmp_path, "--op", "geglu", "--variants", "eager", "--minutes", "0", "--metrics", "wall_us")
    monkeypatch.setattr(late, "seconds", lambda: 1.0)
    late.all()
    assert late.unmeasured == ["geglu 48x64x96: wall_us", "geglu 16x64x96: wall_us"]


def test_a_peer_whose_time_is_up_is_replaced_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: Any
) -> None:
    asked: list[str] = []

    def rehearsal(name: str, op: str, shape: tuple[int, int, int]) -> Verdict:
        asked.append(name)
        if name == "liger":
            return Verdict(False, False, "RuntimeError: no such kernel")
        return Verdict(name == "quack_untuned", True, "its warm-up ran past 60 s")

    for name in ("compile_max", "quack", "quack_untuned", "liger"):
        old = variants.VARIANTS[name]
        plain = variants.Variant(variants._eager, old.ops, None, old.rehearse, old.instead)
        monkeypatch.setitem(variants.VARIANTS, name, plain)
    chosen = ["eager", "compile_max", "quack", "liger"]
    run = make(tmp_path, "--op", "geglu", "--metrics", "wall_us", "--variants", *chosen, rehearsal=rehearsal)
    run.all()
    assert asked[:4] == ["compile_max", "quack", "quack_untuned", "liger"]  # and never eager
    assert {r["variant"] for r in run.rows} == {"eager", "quack_untuned"}
    text = run.table()
    assert "left out: compile_max, geglu 48x64x96: its warm-up ran past 60 s" in text
    assert "left out: quack, geglu 48x64x96: its warm-up ran past 60 s" in text
    assert run.raised["liger, geglu 48x64x96, first calls"] == "RuntimeError: no such kernel"


def test_first_calls_ahead_are_those_of_variants_that_do_not_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ahead, "run", lambda tasks, jobs: told.append((tasks, jobs)))
    monkeypatch.setattr(peers, "missing", lambda name: "not installed" if name == "liger" else None)
    names = ["eager", "compile", "compile_max", "liger", "fused"]
    args = peers.parser().parse_args(["--shapes", "16x64x96,48x64x96", "--op", "geglu", "--variants", *names])
    args.jobs = 3
    peers.compile_ahead(args)
    quick = ["eager", "compile", "fused"]
    wanted = [(ahead.first_calls, ("geglu", shape, quick, "bfloat16")) for shape in (SMALL, TINY)]
    assert told == [(wanted, 3)]
