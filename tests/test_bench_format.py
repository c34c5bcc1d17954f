"""The results format of the benchmarks, their statistics, and the Markdown made from them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common, first, report  # noqa: E402

SHAPE = (8192, 768, 3072)
CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.1, "gemm_tflop_s": 700.0}


def make_row(variant: str, metric: str, values: list[float], pass_: str = "forward") -> dict[str, Any]:
    return common.row("geglu", pass_, SHAPE, variant, metric, values)


@pytest.fixture
def content() -> dict[str, Any]:
    rows = [
        make_row("eager", "kernel_us", [230.0, 234.0, 232.0]),
        make_row("compile", "kernel_us", [206.0]),
        make_row("fused", "kernel_us", [166.0, 165.0]),
        make_row("eager", "wall_us", [1100.0], "step"),
        make_row("fused", "wall_us", [1200.0], "step"),
        make_row("fused", "rel_error", [1.71e-3]),
        make_row("eager", "peak_bytes", [3 * 2.0**20]),
    ]
    return common.result("first", rows, CEILINGS, "NVIDIA H200")


def test_row_has_the_keys_of_the_format_and_its_statistics() -> None:
    row = make_row("fused", "graph_us", [3.0, 1.0, 2.0, 10.0])
    assert row == {
        "op": "geglu",
        "pass": "forward",
        "tokens": 8192,
        "hidden": 768,
        "intermediate": 3072,
        "dtype": "bfloat16",
        "bias": False,
        "variant": "fused",
        "metric": "graph_us",
        "median": 2.5,
        "low": 1.0,
        "high": 10.0,
        "n": 4,
    }
    assert tuple(row) == common.ROW_KEYS


@pytest.mark.parametrize(
    "pass_, metric, values, message",
    [
        ("inference", "kernel_us", [1.0], "pass must be one of forward, backward, step"),
        ("step", "seconds", [1.0], "metric must be one of kernel_us"),
        ("step", "wall_us", [], "finite values"),
        ("step", "wall_us", [1.0, math.nan], "finite values"),
    ],
)
def test_row_refuses_what_is_no_measurement(pass_: str, metric: str, values: list[float], message: str) -> None:
    with pytest.raises(common.BenchError, match=message):
        common.row("geglu", pass_, SHAPE, "fused", metric, values)


@pytest.mark.parametrize(
    "name, slug",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA", "unknown"),
    ],
)
def test_gpu_slug(name: str, slug: str) -> None:
    assert common.gpu_slug(name) == slug


def test_result_says_what_was_measured_and_with_what(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(content) == common.FILE_KEYS
    assert content["torch"] == torch.__version__
    assert content["ceilings"] == CEILINGS
    assert "T" in content["date"] and content["date"].endswith("+00:00")
    assert content["packages"]["python"].startswith("3.")
    monkeypatch.setenv("BENCH_COMMIT", "abc123")
    assert common.commit() == "abc123"


def test_commit_of_a_folder_that_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == "unknown"


def test_write_and_load(content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    path = common.write(content)
    assert path == tmp_path / "h200" / "first.json"
    assert json.loads(path.read_text()) == content
    assert common.load(path) == content
    assert len(path.read_text().splitlines()) < 40  # one row a line: changes can be read
    named = common.write(content, tmp_path / "deep" / "mine.json")
    assert json.loads(named.read_text()) == content


@pytest.mark.parametrize("fault", ["key", "row key", "order", "empty"])
def test_a_malformed_result_is_not_written(content: dict[str, Any], tmp_path: Path, fault: str) -> None:
    if fault == "key":
        del content["driver"]
    elif fault == "row key":
        content["rows"][0]["comment"] = "fast"
    elif fault == "order":
        content["rows"][0]["low"] = 1e9
    else:
        content["rows"] = []
    with pytest.raises(common.BenchError):
        common.write(content, tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_variants_take_turns() -> None:
    orders = list(common.turns(["a", "b", "c"], 4))
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_table_marks_the_cells_where_fused_is_not_faster(content: dict[str, Any]) -> None:
    text, slower = first.table(content["rows"])
    assert slower == 1
    marked = [line for line in text.splitlines() if line.endswith("!")]
    assert len(marked) == 1 and "wall_us" in marked[0] and "0.92" in marked[0]
    kernel_line = next(line for line in text.splitlines() if "kernel_us" in line)
    assert "1.40" in kernel_line and "1.24" in kernel_line  # 232 / 165.5 and 206 / 165.5


def test_markdown(content: dict[str, Any]) -> None:
    text = report.markdown(content)
    assert text.startswith("NVIDIA H200, driver ")
    assert "| kernel time, us | shape | eager | compile | fused | eager / fused | compile / fused |" in text
    assert "| geglu forward, bfloat16 | [8192, 768 -> 3072] | 232.0 | 206.0 | 165.5 | 1.40 | 1.24 |" in text
    assert "| 1100 | 1200 | 0.92 |" in text
    assert "1.71e-03" in text
    assert "| 3.0 |" in text  # MiB
    for block in text.split("\n\n")[1:]:
        widths = {line.count("|") for line in block.strip().splitlines()}
        assert len(widths) == 1, block


def test_markdown_of_chosen_metrics(content: dict[str, Any]) -> None:
    text = report.markdown(content, ["wall_us"])
    assert "wall clock" in text and "kernel time" not in text
    with pytest.raises(common.BenchError, match="host_us"):
        report.markdown(content, ["host_us"])


def test_report_command(content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = common.write(content, tmp_path / "first.json")
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out == report.markdown(content)
    assert report.main([str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_committed_results_follow_the_format() -> None:
    for path in sorted((ROOT / "bench" / "results").glob("*/*.json")):
        common.load(path)


def test_without_a_gpu_the_benchmark_fails_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_report_goes_between_the_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    for _ in range(2):  # again leaves the same
        report.put("| new |\n", readme)
    assert readme.read_text() == f"above\n{report.BEGIN}\n\n| new |\n\n{report.END}\nbelow\n"
    readme.write_text("no markers")
    with pytest.raises(common.BenchError, match="needs the markers"):
        report.put("x", readme)
