"""The profile command on a GPU: guess and seen agree for eager and fused, and the reports say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fusedmlp import cli
from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace.stats import analyse

HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="counts are those of Hopper"
)
MLP = ["--kind", "geglu", "--batch", "64", "--seq", "128", "--dim", "768", "--hidden", "3072"]


def _profiled(tmp_path: Path, *arguments: str) -> dict[tuple[str, str], int]:
    """Runs the command; (variant, pass) -> kernels seen, after guess and seen agreed for eager and fused."""
    assert cli.main(["profile", *arguments, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "report.json").read_text())
    for row in content["guesses"]:
        if row["variant"] in ("eager", "fused"):
            assert row["guess"] == row["seen"], row
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert content["ceilings"]["gemm_tflop_s"] > 1
    for result in content["results"]:
        trace = analyse(load(tmp_path / result["trace"]))
        assert trace.alike and len(trace.steps) == 3
        assert trace.steps[0].kernels == result["seen"] + result["split_k"]
        assert result["host_us"] > 0
    return {(row["variant"], row["pass"]): row["seen"] for row in content["guesses"]}


@HOPPER
def test_geglu(tmp_path: Path) -> None:
    seen = _profiled(tmp_path, "mlp", *MLP, "--eager", "--compile", "--fused", "--backward")
    assert [seen[v, "forward"] for v in ("eager", "compile", "fused")] == [5, 4, 2]
    assert [seen[v, "step"] for v in ("eager", "fused")] == [15, 6]
    assert seen["fused", "step"] < seen["compile", "step"] < seen["eager", "step"]


@HOPPER
def test_naive(tmp_path: Path) -> None:
    arguments = ["mlp", "--kind", "naive", "--batch", "128", "--dim", "1024"]
    seen = _profiled(tmp_path, *arguments, "--eager", "--compile", "--fused", "--backward")
    assert (seen["eager", "forward"], seen["fused", "forward"]) == (6, 1)
    assert (seen["eager", "step"], seen["fused", "step"]) == (18, 8)


@HOPPER
def test_linear(tmp_path: Path) -> None:
    seen = _profiled(tmp_path, "linear", "--eager", "--compile", "--backward")
    assert seen["eager", "forward"] == seen["compile", "forward"] == 1
    assert seen["eager", "step"] == 4


def test_a_model(tmp_path: Path) -> None:
    settings = ["hidden_size=256", "intermediate_size=1024", "num_hidden_layers=2", "num_attention_heads=4"]
    settings += ["num_key_value_heads=4", "vocab_size=1000"]
    command = ["profile", "model", "LlamaConfig", "--set", *settings, "--batch", "2", "--seq", "64"]
    assert cli.main([*command, "--eager", "--fused", "--backward", "--out", str(tmp_path)]) in (0, 1)
    rows = json.loads((tmp_path / "report.json").read_text())["guesses"]
    seen = {(row["variant"], row["pass"]): row["seen"] for row in rows}
    assert seen["fused", "forward"] < seen["eager", "forward"]
    assert seen["fused", "step"] < seen["eager", "step"]
