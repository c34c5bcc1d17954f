"""The script that records the shipped traces, rehearsed on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench import traces
from fusedmlp.profiling.graph_nodes import GraphCountError, count_graph_nodes
from fusedmlp.profiling.record import record_trace


def test_a_trace_has_its_steps_and_a_second_source_beside_it(tmp_path: Path) -> None:
    assert traces.main(["--out", str(tmp_path), "--cpu", "--only", "naive-eager-forward"]) == 0
    with gzip.open(tmp_path / "cpu-naive-eager-forward.json.gz") as f:
        events = json.load(f)["traceEvents"]
    assert sum(str(e.get("name")).startswith("ProfilerStep#") for e in events) == 3
    assert sum(e.get("name") == "aten::addmm" for e in events) == 9
    counts = json.loads((tmp_path / "cpu-naive-eager-forward.counts.json").read_text())
    assert counts["active"] == 3 and counts["device"] == "cpu"


def test_an_item_that_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: str) -> Any:
        raise KeyError("no such model")

    good = traces.items()["linear-eager-forward"]
    monkeypatch.setattr(traces, "items", lambda: {"bad": (broken, 1), "good": good})
    assert traces.main(["--out", str(tmp_path), "--cpu"]) == 1
    assert "FAILED bad: KeyError" in capsys.readouterr().err
    assert (tmp_path / "cpu-good.json.gz").exists()


def test_an_unknown_name_lists_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        traces.main(["--out", str(tmp_path), "--cpu", "--only", "nothing"])
    assert "geglu-eager-forward" in capsys.readouterr().err


def test_a_trace_is_a_json_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'trace.txt'"):
        record_trace(lambda: None, tmp_path / "trace.txt")


def test_graph_nodes_need_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces.torch.cuda, "is_available", lambda: False)
    with pytest.raises(GraphCountError, match="needs a CUDA device"):
        count_graph_nodes(lambda: None)
