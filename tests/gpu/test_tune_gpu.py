"""Tuning on the device: candidates are right, a table is written, and the package follows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusedmlp import calculate_settings, cli, explain_plan, functional, plan
from fusedmlp.settings import tables
from fusedmlp.settings.types import GLUON_ONLY_OPS, Settings
from fusedmlp.tune.candidates import CANDIDATES, sizes
from fusedmlp.tune.measure import measure


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    tables.forget()
    plan.clear()


@pytest.mark.parametrize("op", CANDIDATES)
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_no_candidate_is_wrong(op: str, dtype: str):
    found = measure(op, 64, 256, 512, dtype)
    wrong = [(str(candidate), why) for candidate, why in found.left_out if "relative error" in why]
    assert not wrong
    families = {candidate.family for candidate, _ in found.times}
    assert families >= {"pair"} and (len(families) > 1 or (op in GLUON_ONLY_OPS and dtype == "tf32"))
    assert all(0.5 < time < 1e5 for _, time in found.medians)


def test_the_package_follows_what_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    line = "tune --widths 256,512 --tokens 64 --layers geglu --ops glu"
    assert cli.main(line.split()) == 0
    (path,) = tmp_path.glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    N, K = sizes("glu", 256, 512)
    assert calculate_settings("glu", 64, N, K, torch.bfloat16, "cuda") == Settings(**row["settings"])
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    gate, up = (torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    down = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    note = explain_plan(functional.glu_mlp, x, gate, up, down, activation="gelu").notes[0]
    ratio = row["pair_us"] / row["us"]
    assert note.measured == (
        f"forward: cuBLAS and a pointwise kernel: {ratio:.2f} of the fused kernel's time (measured)",
    )
    capsys.readouterr()
    assert cli.main(line.split()) == 0
    assert "0 measured" in capsys.readouterr().out
