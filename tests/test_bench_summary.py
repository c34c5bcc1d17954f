"""The summary, the plots and the README section of a grid, and heuristic against table, from synthetic results."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common, grid, heuristic, plots, report, summary  # noqa: E402
from bench import sweep as sweep_bench  # noqa: E402
from fusedmlp.settings.heuristic import settings  # noqa: E402

CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.1, "gemm_tflop_s": 800.0}


def rows_of(op: str, pass_: str, shape: tuple[int, int, int], metric: str = "", **times: float) -> list[dict[str, Any]]:
    metric = metric or common.grid_metric(shape[0])
    return [common.row(op, pass_, shape, v, metric, [t], bias=op == "mlp_relu") for v, t in times.items()]


@pytest.fixture
def small() -> dict[str, Any]:
    rows = [
        *rows_of("geglu", "forward", (1, 768, 3072), eager=20.0, compile=16.0, liger=18.0, fused=10.0),
        *rows_of("geglu", "forward", (8192, 768, 3072), eager=200.0, compile=98.1, fused=100.0),  # within 2 %
        *rows_of("geglu", "step", (1, 768, 3072), eager=50.0, compile=97.0, liger=48.0, fused=100.0),
        *rows_of("mlp_relu", "step", (8192, 768, 3072), eager=90.0, compile=100.0, fused=100.0),
        *rows_of("mlp_relu", "step", (1, 768, 3072), "kernel_us", eager=1.0, fused=2.0),  # not what counts there
        *rows_of("mlp_relu", "forward", (1, 768, 3072), fused=2.0),  # nothing to compare with
    ]
    return common.result("grid", rows, CEILINGS, "NVIDIA H200")


@pytest.fixture
def whole() -> dict[str, Any]:
    """Every cell of the grid, with times that follow from the work."""
    rows = []
    for op, (D, H), some in grid.visits(grid.parser().parse_args([])):
        for tokens in some:
            for pass_ in ("forward", "step"):
                us = 5 + plots.MATRICES[op] * plots.PRODUCTS[pass_] * 2 * tokens * D * H / 7e8
                speedup = 1.3 - 0.02 * math.log2(tokens)
                times = {"eager": us * speedup, "compile": us * (speedup - 0.05), "fused": us}
                rows += rows_of(op, pass_, (tokens, D, H), **times)
    return common.result("grid", rows, CEILINGS, "NVIDIA H200")


def test_means_and_worst_cells(small: dict[str, Any]) -> None:
    text = summary.markdown(small)
    forward, step = "geglu forward [8192, 768 -> 3072], bfloat16", "geglu step [1, 768 -> 3072], bfloat16"
    assert f"| forward | eager | 2.000 | 2 | 2.000 at geglu forward [1, 768 -> 3072], bfloat16 |" in text  # noqa: F541
    assert f"| forward | compile | {(1.6 * 0.981) ** 0.5:.3f} | 2 | 0.981 at {forward} |" in text
    assert f"| step | eager | {(0.5 * 0.9) ** 0.5:.3f} | 2 | 0.500 at {step} |" in text
    assert f"| step | liger | 0.480 | 1 | 0.480 at {step} |" in text


def test_what_is_lost_is_listed_worst_first(small: dict[str, Any]) -> None:
    text = summary.markdown(small)
    assert "Cells more than 2% slower than the best of the others: 0 of 2 in the forward, 2 of 2 in the step." in text
    listed = text.split("| lost |")[1].splitlines()[2:]
    assert listed == [
        "| geglu step [1, 768 -> 3072], bfloat16 | 100.0 | 48.0 (liger) | 0.480 |",
        "| mlp_relu step [8192, 768 -> 3072], bfloat16 | 100.0 | 90.0 (eager) | 0.900 |",
    ]
    rows = [r for r in small["rows"] if r["pass"] == "forward"]
    assert "| lost |" not in summary.markdown({**small, "rows": rows})
    with pytest.raises(common.BenchError, match="no time of fused beside"):
        summary.cells({**small, "rows": [r for r in rows if r["variant"] != "fused"]})


def test_the_summary_command(small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = common.write(small, tmp_path / "grid.json")
    assert report.main([str(path), "--grid"]) == 0
    text = capsys.readouterr().out
    assert summary.markdown(small) in text and text.startswith("NVIDIA H200")
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out == text  # of a grid it is the summary in any case


def test_lines_of_the_grid(whole: dict[str, Any]) -> None:
    parts = list(plots.groups(whole["rows"], plots.GRID))
    assert [(part, many) for part, many, _ in parts] == [("geglu-", True), ("mlp_relu-", True)]
    lines = plots.speedups(parts[0][2], "step", "eager", plots.time_metric(whole))
    assert len(lines) == 13 and all([t for t, _ in points] == list(grid.TOKENS) for points in lines.values())
    assert lines["geglu 768 -> 3072"][4] == (16, pytest.approx(1.3 - 0.02 * 4))
    share = dict(plots.share_lines(parts[1][2], "forward", plots.GRID, 800.0)["mlp_relu 8192 -> 28672"])
    flop = 4 * 16384 * 8192 * 28672
    assert share[16384] == pytest.approx(flop / ((5 + flop / 7e8) * 1e-6) / 800e12)


@pytest.mark.parametrize("suffix", plots.FORMATS)
def test_plots_of_the_grid(whole: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    found = plots.draw(whole, tmp_path, suffix=suffix)
    ops, passes = ("geglu", "mlp_relu"), ("forward", "step")
    assert {p.name for p in found} == {
        f"{k}-{op}-{p}.{suffix}" for k in ("speedup", "ceiling") for op in ops for p in passes
    }
    for path in found:
        assert 10_000 < path.stat().st_size < 200_000, path
    first = found[0].read_bytes()
    assert plots.draw(whole, tmp_path, suffix=suffix)[0].read_bytes() == first
    if suffix == "svg":
        assert b"geglu 8192 -&gt; 28672" in first and b"over compile" in first


def test_a_readme_shows_all_files_and_the_plots(
    small: dict[str, Any], whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    rows = rows_of("geglu", "step", (8192, 768, 3072), "kernel_us", eager=2.0, fused=1.0)
    peers = common.write(common.result("peers", rows, CEILINGS, "NVIDIA H200"), tmp_path / "peers.json")
    rows = rows_of("geglu", "step", (8192, 768, 3072), "kernel_us", quack_untuned=2.0, fused=1.0)
    quack = common.write(common.result("peers", rows, CEILINGS, "NVIDIA H200"), tmp_path / "quack.json")
    path = common.write({**whole, "rows": [*whole["rows"], *small["rows"][:4]]}, tmp_path / "grid.json")
    folder = tmp_path / "docs" / "plots"
    assert report.main([str(peers), str(quack), str(path), "--readme", str(readme), "--plots", str(folder)]) == 0
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "old" not in text
    headings = ["### Against the peers", "### Against quack", "### Over the grid", "geometric mean"]
    assert sorted(headings, key=text.index) == headings
    shown = re.findall(r"!\[([\w-]+)\]\(([^)]+)\)", text)
    assert len(shown) == 4 and all(link == f"docs/plots/{name}.svg" for name, link in shown)
    assert all((tmp_path / link).is_file() for _, link in shown)
    assert report.main([str(path), "--readme", str(readme), "--plots", str(tmp_path.parent)]) == 1
    assert "can show plots in its own folder" in capsys.readouterr().err and readme.read_text() == text


# ------------------------------------------------------------------------------------------ heuristic and table


def sweep(tmp_path: Path, name: str, op: str, shape: tuple[int, int, int], **times: float) -> Path:
    rows = [common.row(op, "forward", shape, v.replace("_", " "), "graph_us", [t, t]) for v, t in times.items()]
    return common.write(common.result("sweep", rows, CEILINGS, "NVIDIA H200"), tmp_path / f"{name}.json")


def test_distances_from_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = str(settings("glu", 8192, 3072, 768, heuristic.torch.bfloat16, "gluon", heuristic.NO_TABLE))
    other, pair = "tma 64x64x64 warps 4 stages 4 parts 1", "pair (cuBLAS + pointwise)"
    shape = (8192, 768, 3072)
    near = sweep(tmp_path, "sweep", "glu", shape, **{taken: 104.0, other: 100.0, pair: 50.0})
    # The pair may not serve the forward, so that the table takes 100 us, not 50.
    found = heuristic.distances([near])
    assert [d.ratio for d in found.found] == [1.04] and not found.unswept and not found.unmeasured
    far = sweep(tmp_path, "sweep-b", "glu", (16384, 768, 3072), **{taken: 150.0, other: 100.0})
    old = sweep(tmp_path, "sweep-c", "glu", (4096, 768, 3072), **{other: 100.0})
    unfit = sweep(tmp_path, "sweep-d", "glu", (2048, 768, 3072), **{"gluon 1x1x1 warps 4 stages 4 parts 1": 9.0})
    assert report.main(["--heuristic", *map(str, (near, far, old, unfit))]) == 0
    text = capsys.readouterr().out
    assert "takes 1.270 of the table's at the median of 2 kernels and shapes; at worst 1.500: glu [16384" in text
    assert "not measured: glu [2048, 768 -> 3072]: gluon" in text and "1 shapes were swept before" in text
    looked = common.load(near)
    looked["rows"] = [{**r, "n": 1, "median": 9.0, "low": 9.0} for r in looked["rows"]]
    once = common.write(looked, tmp_path / "sweep-f.json")
    assert [d.ratio for d in heuristic.distances([near, once]).found] == [1.04]  # one look is no measurement
    later = sweep(tmp_path, "sweep-e", "glu", shape, **{taken: 100.0})
    assert heuristic.distances([near, later]).median == 1.0


def test_a_table_is_made_of_result_files(tmp_path: Path) -> None:
    """Without a GPU: the rule's choice of each shape, of the latest run, for both 16-bit dtypes."""
    other, pair = "tma 64x64x64 warps 4 stages 4 parts 1", "pair (cuBLAS + pointwise)"
    small = {other: 30.0, "tma 64x32x128 warps 4 stages 4 parts 1": 20.0, pair: 25.0}
    first = sweep(tmp_path, "sweep", "glu", (128, 768, 3072), **small)
    again = sweep(tmp_path, "sweep-b", "act_backward", (16, 768, 3072), **{other: 90.0, pair: 30.0})
    table = tmp_path / "table.json"
    files = [str(first), str(again)]
    assert sweep_bench.main(["--from-results", *files, "--out", str(table)]) == 0
    content = json.loads(table.read_text())
    assert content["gpu"] == "NVIDIA H200" and "rows" in content
    found = {(r["op"], r["dtype"], r["M"]): r["settings"]["family"] for r in content["rows"]}
    dtypes = ("bfloat16", "float16")
    expected = {("glu", d, 128): "tma" for d in dtypes} | {("act_backward", d, 16): "pair" for d in dtypes}
    assert found == expected
    assert [r["us"] for r in content["rows"] if "us" in r] == [30.0, 20.0]
    assert sweep_bench.main(["--from-results", *files]) == 2


def test_the_shipped_table_is_made_of_the_committed_results() -> None:
    folder = common.RESULTS / "h200"
    made = sweep_bench.from_results([str(path) for path in sorted(folder.glob("sweep*.json"))])
    shipped = json.loads((common.ROOT / "fusedmlp" / "settings" / "nvidia-h200.json").read_text())["rows"]
    assert made == shipped


def test_grids_of_several_runs_are_one(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a cell in both the later run counts, as a whole: variants of another run stand beside nothing of this one."""
    earlier = {**small, "date": "2026-01-01T00:00:00+00:00", "commit": "1111111"}
    rows = rows_of("geglu", "step", (1, 768, 3072), eager=50.0, fused=40.0)
    later = {**small, "rows": rows, "date": "2026-02-01T00:00:00+00:00", "commit": "2222222"}
    for contents in ([earlier, later], [later, earlier]):
        joined = summary.union(contents)
        assert joined["commit"] == "2222222" and len(summary.cells(joined)) == len(summary.cells(small))
        (cell,) = [c for c in summary.cells(joined) if (c.op, c.pass_) == ("geglu", "step")]
        assert cell.times == {"eager": 50.0, "fused": 40.0}
    with pytest.raises(common.BenchError, match="several GPUs: NVIDIA A100, NVIDIA H200"):
        summary.union([earlier, {**later, "gpu": "NVIDIA A100"}])
    files = [str(common.write(c, tmp_path / f"{c['commit']}.json")) for c in (earlier, later)]
    assert report.main(files) == 0
    text = capsys.readouterr().out
    assert text.index("commit 2222222") < text.index("commit 1111111") and text.count("| pass | over |") == 1
    assert "1 of 2 in the step" in text  # two of two in the earlier run
