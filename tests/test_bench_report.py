"""Ratios and plots from a synthetic result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common, plots, report, variants  # noqa: E402

CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.1, "gemm_tflop_s": 800.0}


@pytest.fixture
def content() -> dict[str, Any]:
    rows = []

    def add(pass_: str, shape: tuple[int, int, int], metric: str, **times: float) -> None:
        rows.extend(common.row("geglu", pass_, shape, v, metric, [t]) for v, t in times.items())

    add("forward", (8192, 768, 3072), "kernel_us", eager=200.0, compile=160.0, fused=100.0)
    add("forward", (128, 768, 3072), "kernel_us", eager=20.0, compile=10.0, fused=12.5)
    add("step", (8192, 768, 3072), "kernel_us", eager=600.0, fused=300.0)
    add("step", (8192, 768, 3072), "wall_us", eager=600.0, fused=660.0)
    return common.result("peers", rows, CEILINGS, "NVIDIA H200")


def test_ratios(content: dict[str, Any]) -> None:
    text = report.ratios(content)
    assert "| kernel time, us | shape | fused / eager | fused / compile |" in text
    assert "| geglu forward, bfloat16 | [8192, 768 -> 3072] | 0.500 | 0.625 |" in text
    assert "| geglu forward, bfloat16 | [128, 768 -> 3072] | 0.625 | 1.250 |" in text
    assert "| geglu step, bfloat16 | [8192, 768 -> 3072] | 0.500 |  |" in text
    assert "| geometric mean |  | 0.539 | 0.884 |" in text  # (0.5 * 0.625 * 0.5) ** (1 / 3), (0.625 * 1.25) ** (1 / 2)
    assert "Worst against eager: 0.625 (geglu forward, bfloat16, [128, 768 -> 3072])." in text
    assert "Worst against compile: 1.250 (geglu forward, bfloat16, [128, 768 -> 3072])." in text
    assert "Worst against eager: 1.100 (geglu step" in text
    assert "wall clock" not in report.ratios(content, ["kernel_us"])
    with pytest.raises(common.BenchError, match="graph_us"):
        report.ratios(content, ["graph_us"])


def test_values_of_the_plots(content: dict[str, Any]) -> None:
    rows = content["rows"]
    assert plots.speedups(rows, "forward", "eager", "kernel_us") == {"geglu 768 -> 3072": [(128, 1.6), (8192, 2.0)]}
    assert plots.speedups(rows, "forward", "compile", "kernel_us") == {"geglu 768 -> 3072": [(128, 0.8), (8192, 1.6)]}
    assert plots.speedups(rows, "step", "compile", "kernel_us") == {}
    large = plots.shares(rows, "forward", "kernel_us", 800.0)["geglu\n8192\n768->3072"]
    assert large["fused"] == pytest.approx(6 * 8192 * 768 * 3072 / 100e-6 / 800e12)
    assert large["eager"] == pytest.approx(large["fused"] / 2)
    step = plots.shares(rows, "step", "kernel_us", 800.0)["geglu\n8192\n768->3072"]
    assert step["fused"] == pytest.approx(18 * 8192 * 768 * 3072 / 300e-6 / 800e12)
    assert {op: o.matrices for op, o in variants.OPS.items()} == plots.MATRICES


def test_plots_are_drawn_from_a_file_alone(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = common.write(content, tmp_path / "peers.json")
    assert report.main([str(path), "--plots", str(tmp_path / "plots")]) == 0
    names = ["speedup-forward.png", "ceiling-forward.png", "speedup-step.png", "ceiling-step.png"]
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == names
    for name in names:
        data = (tmp_path / "plots" / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
    assert report.main([str(path), "--plots", str(tmp_path / "wall"), "--metrics", "wall_us"]) == 0
    assert sorted(p.name for p in (tmp_path / "wall").iterdir()) == ["ceiling-step.png", "speedup-step.png"]
    assert report.main([str(path), "--plots", str(tmp_path / "none"), "--metrics", "graph_us"]) == 1
    assert report.main([str(path), "--ratios"]) == 0
    assert "geometric mean" in capsys.readouterr().out


def test_without_matplotlib_the_plots_say_so(content: dict[str, Any], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = common.write(content, tmp_path / "peers.json")
    assert report.main([str(path), "--plots", str(tmp_path / "plots")]) == 1
    assert "plots need matplotlib" in capsys.readouterr().err
