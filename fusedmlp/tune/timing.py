"""Timing on a CUDA device, for tuning and for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Call = Callable[[int], Any]  # one call or step on input set number i


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The variants in an order that rotates from round to round, so that none always follows the same
    other."""
    for i in range(rounds):
        k = i % len(names)
        yield [*names[k:], *names[:k]]


def events_us(fn: Callable[[], Any], repeats: int) -> list[float]:
    """Device time of each call, in microseconds, between two CUDA events."""
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [b.elapsed_time(e) * 1e3 for b, e in pairs]


def graph_us(variants: dict[str, Call], sets: int, rounds: int = 15) -> dict[str, list[float]]:
    """Time of one call out of a CUDA graph that holds one call on each input set, in microseconds."""
    graphs = {name: _graph(call, sets) for name, call in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for order in turns(list(variants), rounds):
        for name in order:
            graphs[name].replay()  # the timed replay below follows one of its own kind
            times[name] += [t / sets for t in events_us(graphs[name].replay, 2)]
    return times


def _graph(call: Call, sets: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in [*range(sets), *range(sets)]:
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            call(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the float64 reference."""
    return ((value.double() - reference).norm() / reference.norm()).item()
