"""Record a Chrome trace of some steps: warmed up, synchronised, gzipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WAIT, WARMUP, ACTIVE = 1, 1, 3


def record_trace(
    step: Callable[[], Any],
    path: str | Path,
    *,
    wait: int = WAIT,
    warmup: int = WARMUP,
    active: int = ACTIVE,
    record_shapes: bool = True,
) -> Path:
    """Profile ``active`` calls of ``step()`` after ``wait + warmup`` others, and write a Chrome trace.

    Every call ends in a synchronisation inside its profiler step, so that no kernel strays into the next one. Device
    activity is recorded where there is a CUDA device. Run first calls (compilation, cuBLAS workspaces) before.

    path: ends in ``.json`` or ``.json.gz``. Returns it. Raises ValueError for another ending.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"a trace is written to a file that ends in .json or .json.gz, got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    on_device = torch.cuda.is_available()
    if on_device:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()

    def write(p: Any) -> None:
        p.export_chrome_trace(str(path))

    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, record_shapes=record_shapes) as p:
        for _ in range(wait + warmup + active):
            step()
            if on_device:
                torch.cuda.synchronize()
            p.step()
    return path
