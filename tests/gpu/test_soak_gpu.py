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


def test_nothing_grows_and_nothing_differs() -> None:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    try:
        assert soak.soak(devices, 1500) == []
        assert len(plan._plans) <= plan.MAX_PLANS
    finally:
        plan.clear()
