"""Zeros for the grid barriers and arrival counters of kernels, which leave them zero."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from . import record

_counters: dict[tuple[int, int, int], Tensor] = {}
_for_graphs: dict[int, Tensor] = {}  # by device: the zeros that are left for captured kernels
_graph_blocks: list[Tensor] = []  # all that any came from: graphs use them for good
_lock = Lock()  # of these three
COUNTERS = 8  # int32: two for each grid barrier of a kernel, up to four barriers
GRAPH_COUNTERS = 1 << 18  # int32, a mebibyte


def barrier_counters(device: torch.device, count: int = COUNTERS) -> Tensor:
    """At least ``count`` int32 zeros for the grid barriers or arrival counters of one kernel, which leaves them zero.

    One buffer a (device, stream, size): kernels of a stream run in turn. A kernel inside a captured graph gets its
    own, since the graph may be replayed on any stream beside others.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return barrier_counters(device, count)
    # Few sizes, none of which is ever replaced: a kernel in flight may still use the buffer.
    count = max(COUNTERS, 1 << (count - 1).bit_length())
    if torch.cuda.is_current_stream_capturing():
        return _counters_of_graph(device, count)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index), count)
    found = _counters.get(key)
    if found is None:
        made = _zeros_outside_pools(device, count)
        with _lock:
            found = _counters.setdefault(key, made)  # another thread's, if it was first
        supply_graphs(device)
    written = record.current()
    if written is not None:
        written.constant(found)
    return found


def supply_graphs(device: torch.device) -> None:
    """See to it that captures on a CUDA device find zeros: made within one, each replay would fill them by a launch."""
    left = _for_graphs.get(device.index)
    if left is not None and left.numel() >= GRAPH_COUNTERS // 4:
        return
    block = _zeros_outside_pools(device, GRAPH_COUNTERS)
    with _lock:
        if _for_graphs.get(device.index) is left:
            _graph_blocks.append(block)
            _for_graphs[device.index] = block


def _counters_of_graph(device: torch.device, count: int) -> Tensor:
    with _lock:
        left = _for_graphs.get(device.index)
        if left is not None and left.numel() >= count:
            _for_graphs[device.index] = left[count:]
            return left[:count]
    return torch.zeros(count, dtype=torch.int32, device=device)


def _zeros_outside_pools(device: torch.device, count: int) -> Tensor:
    """Counters that live on. A thread of its own allocates them: where the caller's allocations go to the memory pool
    of a CUDA graph about to be captured, they must not."""

    def allocate() -> Tensor:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # other streams read them
        return zeros

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(allocate).result()
