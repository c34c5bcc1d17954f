"""bench/hub.py without a GPU: what is compared, with meters that only call, and the table of limits."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fusedmlp.hub.build import build

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import case, common, hub  # noqa: E402
from bench.variants import VARIANTS  # noqa: E402


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, clean_source: Any) -> ModuleType:
    folder = tmp_path_factory.mktemp("bench")
    build(folder, clean_source, launcher=False)
    return hub.load(folder)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def meter(calls: dict[str, common.Call], sets: int, rounds: int) -> dict[str, list[float]]:
        for call in calls.values():
            call(0)
        return {name: [float(rounds)] * 3 for name in calls}

    monkeypatch.setattr(hub, "Case", lambda op, shape: case.Case(op, shape, device="cpu", sets=1))
    monkeypatch.setattr(hub, "WIDTHS", (32, 48))
    for name in ("kernel_us", "host_us"):
        monkeypatch.setattr(common, name, meter)


def test_three_ways_are_measured_on_the_same_weights(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(VARIANTS, "hub", None)
    monkeypatch.setitem(VARIANTS, "kernelized", None)
    hub.add_variants(kernel)
    rows = [*hub.measure(128, rounds=1), *hub.measure(1024, rounds=1)]
    found = {(r["tokens"], r["pass"], r["metric"]) for r in rows}
    assert found == {
        *((t, p, "kernel_us") for t in (128, 1024) for p in ("forward", "step")),
        *((128, p, "host_us") for p in ("forward", "step")),
    }
    assert {r["variant"] for r in rows} == set(hub.NAMES)
    text, missed = hub.table(rows)
    assert missed == 0 and text.count("holds") == 4 * 2 + 2


def test_another_way_is_an_error(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(VARIANTS, "hub", None)
    monkeypatch.setitem(VARIANTS, "kernelized", None)
    hub.add_variants(kernel)
    monkeypatch.setattr(kernel, "explain_plan", lambda module, x: type("E", (), {"notes": ["another"]}))
    with pytest.raises(common.BenchError, match="the ways at .* differ"):
        hub.measure(128, rounds=1)


@pytest.mark.parametrize("metric, variant, factor", [("kernel_us", "hub", 1.04), ("host_us", "hub", 1.11)])
def test_a_slower_tree_is_seen(metric: str, variant: str, factor: float):
    rows = [
        common.row(
            "geglu", "forward", (128, 768, 3072), name, m, [100 * (factor if (m, name) == (metric, variant) else 1)]
        )
        for m in ("kernel_us", "host_us")
        for name in hub.NAMES
    ]
    text, missed = hub.table(rows)
    assert missed == 1 == text.count("MISSED")


def test_what_was_not_measured_does_not_hold():
    text, missed = hub.table([])
    assert missed == 2 == text.count("not measured")


def test_what_cannot_be_done_here_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "build" / "torch-xpu").mkdir(parents=True)
    with pytest.raises(common.BenchError, match="has no variant for this machine"):
        hub.load(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hub.main([str(tmp_path)]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
