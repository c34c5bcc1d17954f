"""bench/sweep.py without a GPU: what it measures in which order, and its two files. Measuring is a stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.aot import DEVICES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import ahead, common, sweep  # noqa: E402
from fusedmlp.settings import tables  # noqa: E402
from fusedmlp.tune.candidates import candidates  # noqa: E402
from fusedmlp.tune.measure import Measured  # noqa: E402

CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.1, "gemm_tflop_s": 800.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    def measure(op: str, M: int, D: int, H: int, dtype: str, families: Sequence[str]) -> Measured:
        found.append((op, M, D, H, dtype))
        served = [c for c in candidates(op, M, True, True) if c.family in families]
        return Measured([(c, [50.0 - i, 51.0 - i]) for i, c in enumerate(served[:-1])], [(served[-1], "does not fit")])

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "info", lambda device: DEVICES["nvidia-h200"])
    monkeypatch.setattr(common, "need_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(common, "ceilings", lambda: CEILINGS)
    return found


def test_all_kernels_of_a_width_come_before_the_next(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    out, log = tmp_path / "table.json", tmp_path / "log.json"
    files = ["--out", str(out), "--log", str(log)]
    assert sweep.main(["--widths", "96,192", "32,64", "--tokens", "8", "16", "--ops", "glu", "glu_grads", *files]) == 0
    order = [(op, M, D, H) for D, H in ((96, 192), (32, 64)) for op in ("glu", "glu_grads") for M in (8, 16)]
    assert asked == [(*job, "bfloat16") for job in order]
    rows = common.load(log)["rows"]
    assert len(rows) == sum(len(candidates(op, M, True, True)) - 1 for op, M, *_ in order)
    assert rows[0]["median"] == 50.5 and rows[0]["n"] == 2 and rows[0]["variant"] == "pair (cuBLAS + pointwise)"
    table = tables.parse(out.read_text())
    best = candidates("glu", 16, True, True)[-2]
    for dtype in ("bfloat16", "float16"):
        found = table["glu", dtype, "", 64, 32]
        assert [(row.M, row.settings) for row in found] == [(8, best), (16, best)]
    assert not [key for key in table if key[0] == "glu_grads"]  # never in tables
    shipped = tables.load("nvidia-h200")
    assert set(shipped) < set(table)  # what was not measured this time stays


def test_a_run_out_of_time_leaves_whole_files(asked: list[Any], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sweep.time, "perf_counter", lambda: 30.0 * len(asked))
    files = ["--out", str(tmp_path / "table.json"), "--log", str(tmp_path / "log.json")]
    assert sweep.main(["--widths", "96,192", "32,64", "--tokens", "8", "--ops", "glu", "--minutes", "0.4", *files]) == 0
    assert [job[2] for job in asked] == [96]
    assert "not measured in the 0.4 minutes: glu 32 -> 64" in capsys.readouterr().out
    assert {row["hidden"] for row in common.load(tmp_path / "log.json")["rows"]} == {96}


def test_candidates_are_compiled_before_anything_is_measured(asked: list[Any], tmp_path: Path, monkeypatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ahead, "kernel_tasks", lambda ops, shapes, dtype, families: [ops, shapes, dtype])
    monkeypatch.setattr(ahead, "run", lambda tasks, jobs: told.append((tasks, jobs, len(asked))))
    files = ["--out", str(tmp_path / "table.json"), "--log", str(tmp_path / "log.json")]
    assert sweep.main(["--widths", "96,192", "--tokens", "8", "16", "--ops", "glu", "--jobs", "7", *files]) == 0
    assert told == [([["glu"], [(8, 96, 192), (16, 96, 192)], "bfloat16"], 7, 0)]


def test_families_bound_the_candidates(asked: list[Any], tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "table.json"), "--log", str(tmp_path / "log.json")]
    asked_for = ["--widths", "96,192", "--tokens", "8", "--ops", "glu_backward", "--families", "gluon", "pair"]
    assert sweep.main([*asked_for, *files]) == 0
    assert {row["variant"].split()[0] for row in common.load(tmp_path / "log.json")["rows"]} == {"gluon", "pair"}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_nothing_measured_writes_nothing(asked: list[Any], tmp_path: Path) -> None:
    files = ["--out", str(tmp_path / "table.json"), "--log", str(tmp_path / "log.json")]
    assert sweep.main(["--minutes", "-1", *files]) == 1
    assert not list(tmp_path.iterdir())
    assert json.loads((ROOT / "fusedmlp/settings/nvidia-h200.json").read_text())["rows"]
