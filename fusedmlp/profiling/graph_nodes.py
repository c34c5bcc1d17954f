"""Count the kernels of a CUDA graph: a source of launch counts that has nothing in common with the profiler.

A capture records what a piece of code asks the device to do, without running it; the driver then lists the nodes.
No CUPTI, no trace, no names: it can neither lose events nor add any.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# CUgraphNodeType of the driver's cuda.h.
_KINDS = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "event", 7: "event"}


class GraphCountError(RuntimeError):
    """The code cannot be captured into a CUDA graph, or there is no CUDA driver to list its nodes."""


@dataclass(frozen=True)
class NodeCounts:
    """Nodes of a captured graph by kind, child graphs included; ``others``: waits, events, host functions."""

    kernels: int
    memcpy: int
    memset: int
    others: int


def _driver() -> Any:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise GraphCountError("the CUDA driver's library (libcuda.so.1) cannot be loaded on this machine")


def _call(driver: Any, name: str, *args: Any) -> None:
    code = getattr(driver, name)(*args)
    if code:
        raise GraphCountError(f"{name} of the CUDA driver failed with error {code}")


def _count(driver: Any, graph: int, found: Counter[str]) -> None:
    size = ctypes.c_size_t()
    _call(driver, "cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(size))
    nodes = (ctypes.c_void_p * size.value)()
    _call(driver, "cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(size))
    for node in nodes[: size.value]:
        number = ctypes.c_int()
        _call(driver, "cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(number))
        kind = _KINDS.get(number.value, "other")
        if kind != "graph":
            found[kind] += 1
            continue
        child = ctypes.c_void_p()
        _call(driver, "cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(child))
        _count(driver, child.value or 0, found)


def count_graph_nodes(fn: Callable[[], Any], warmup: int = 3) -> NodeCounts:
    """Capture one call of ``fn()`` into a CUDA graph and count the graph's nodes; the graph is never replayed.

    fn: called ``warmup`` times on a side stream before, as a capture needs. It must be capturable: no
    synchronisation, no copy from the host's pageable memory.

    Raises GraphCountError without a CUDA device, or where the call cannot be captured.
    """
    if not torch.cuda.is_available():
        raise GraphCountError(f"counting graph nodes needs a CUDA device; torch {torch.__version__} sees none")
    driver = _driver()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.cuda.graph(graph, stream=side):
            fn()
    except RuntimeError as error:
        raise GraphCountError(f"this code cannot be captured into a CUDA graph: {error}") from error
    found: Counter[str] = Counter()
    _count(driver, graph.raw_cuda_graph(), found)
    others = sum(n for kind, n in found.items() if kind not in ("kernel", "memcpy", "memset"))
    return NodeCounts(found["kernel"], found["memcpy"], found["memset"], others)
