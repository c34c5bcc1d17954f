"""bench/soak.py for a short while on every device: by threads, on streams of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import soak
from fusedmlp import plan

pytestmark = pytest.mark.gpu


def test_nothing_grows_and_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    empty, kept = soak.empty_caches, []

    def looked_at(threads: int) -> list[str]:
        kept.append(len(plan._plans))
        return empty(threads)

    monkeypatch.setattr(soak, "empty_caches", looked_at)
    try:
        assert soak.soak(devices, 1500) == []
        # As soak() asks of each mark; threads that find the cache one below its bound add a plan each.
        assert len(kept) == 3 and all(0 < count <= plan.MAX_PLANS + 4 * len(devices) for count in kept)
    finally:
        plan.clear()
