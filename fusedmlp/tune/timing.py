"""Timing on a CUDA device, for tuning and for the benchmarks.

A GPU draws more power under load than it may for long, and lowers its clock within some tens of milliseconds: an H200
ran the product of a wide layer in 1475 us within a short burst and in 1795 us without a pause. Training is the latter.
So everything here is timed after :data:`SETTLE_US` of the same work, and variants follow each other without a pause.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

Call = Callable[[int], Any]  # one call or step on input set number i
Name = TypeVar("Name")  # of a variant

SETTLE_US = 50_000.0  # of device work, after which the clock is that of sustained load
SETTLE_GRAPHS_US = 30_000.0  # of all variants' graphs; the rounds that follow go on without a pause
ALONE_US = 30_000.0  # of replays of one graph alone, timed together
LOOK_ONCE_US = 2_000.0  # what takes longer is looked at once
SETTLE_CALLS = 1000  # at most: calls that short leave the device idle in between, and no clock falls


def turns(names: Sequence[Name], rounds: int) -> Iterator[list[Name]]:
    """The variants in an order that rotates from round to round, so that none always follows the same
    other."""
    for i in range(rounds):
        k = i % len(names)
        yield [*names[k:], *names[:k]]


def l2_bytes() -> int:
    """Size of the current device's L2 cache."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def input_sets(bytes_per_set: int, least: int = 2, most: int = 24) -> int:
    """How many input sets (inputs and weights) to rotate so that each is out of the L2 cache when its turn comes.

    One where a single set is many times the cache.
    """
    l2 = l2_bytes()
    if bytes_per_set >= 8 * l2:
        return 1
    return min(most, max(least, math.ceil(2.5 * l2 / bytes_per_set)))


def _between_events(fn: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    fn()
    end.record()
    return begin, end


def events_us(fn: Callable[[], Any], repeats: int) -> list[float]:
    """Device time of each call, in microseconds, between two CUDA events."""
    pairs = [_between_events(fn) for _ in range(repeats)]
    torch.cuda.synchronize()
    return [b.elapsed_time(e) * 1e3 for b, e in pairs]


def look_us(call: Call) -> float:
    """About what a call takes, in microseconds: device time, or host time where that is longer."""

    def row(calls: int) -> float:
        return events_us(lambda: [call(0) for _ in range(calls)], 1)[0] / calls

    once = row(1)
    return once if once > LOOK_ONCE_US else min(once, row(3))


def settle(call: Call, sets: int, us: float) -> None:
    """Runs ``call``, which takes about ``us``, on the sets in turn for :data:`SETTLE_US`; does not wait for it."""
    for i in range(min(SETTLE_CALLS, math.ceil(SETTLE_US / us))):
        call(i % sets)


def graph_us(variants: dict[str, Call], sets: int, rounds: int = 15) -> dict[str, list[float]]:
    """Time of one call out of a CUDA graph that holds one call on each input set, in microseconds.

    Under load: the clock settles first, and all replays follow each other without a pause.
    """
    graphs = captured(variants, sets)
    settle_graphs(graphs)
    return replays_us(graphs, sets, rounds)


def captured(variants: Mapping[Name, Call], calls: int) -> dict[Name, torch.cuda.CUDAGraph]:
    """A graph of ``calls`` calls of each, which have all run before.

    Results are thrown away, and the graphs share their memory: together they hold no more than the largest of them.
    That is sound where replays follow each other on one stream, since every graph writes before it reads.
    """
    from ..counters import supply_graphs

    graphs = {}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what is cached cannot be given back while a graph is captured
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for name, call in variants.items():
            for i in range(calls):  # workspaces of this stream
                call(i)
            torch.cuda.synchronize()
            supply_graphs(torch.device("cuda", torch.cuda.current_device()))
            graphs[name] = _capture(call, calls, pool)
    torch.cuda.current_stream().wait_stream(side)
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    return graphs


def _capture(call: Call, calls: int, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # the end of another graph or tensor is no part of this one
    try:
        graph.capture_begin(pool=pool)
        try:
            for i in range(calls):
                call(i)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what went wrong inside is the reason
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph


def settle_graphs(graphs: Mapping[Name, torch.cuda.CUDAGraph]) -> float:
    """Replays all in turn for :data:`SETTLE_GRAPHS_US`, and does not wait; returns what the shortest takes, in
    microseconds."""
    once = [events_us(graph.replay, 1)[0] for graph in graphs.values()]
    for _ in range(math.ceil(SETTLE_GRAPHS_US / sum(once))):
        for graph in graphs.values():
            graph.replay()
    return min(once)


def replays_us(
    graphs: Mapping[Name, torch.cuda.CUDAGraph], calls: int, rounds: int, timed: int = 2, lead: int = 1
) -> dict[Name, list[float]]:
    """Time of one of the ``calls`` in each graph, in microseconds: rounds * timed values each.

    The graphs take turns of ``lead`` replays and ``timed`` timed ones, in an order that rotates. The device is never
    left to idle, since all is queued before anything is read. :func:`settle_graphs` comes before it.
    """
    pairs: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for order in turns(list(graphs), rounds):
        for name in order:
            for _ in range(lead):
                graphs[name].replay()
            pairs[name] += [_between_events(graphs[name].replay) for _ in range(timed)]
    torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) * 1e3 / calls for b, e in of_name] for name, of_name in pairs.items()}


def graph_alone_us(variants: dict[str, Call], sets: int, rounds: int = 3) -> dict[str, list[float]]:
    """As :func:`graph_us`, of a variant at the clock that the card holds under its own load: each turn replays one
    graph alone, first for :data:`SETTLE_US`, then for :data:`ALONE_US`, whose mean is the value."""
    graphs = captured(variants, sets)
    once = {name: events_us(graph.replay, 1)[0] for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for order in turns(list(graphs), rounds):
        for name in order:
            replay = partial(_replay, graphs[name])
            settle(lambda _, replay=replay: replay(1), 1, once[name])  # type: ignore[misc]
            count = math.ceil(ALONE_US / once[name])
            times[name].append(events_us(partial(replay, count), 1)[0] / count / sets)
    return times


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> None:
    for _ in range(count):
        graph.replay()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the float64 reference."""
    return ((value.double() - reference).norm() / reference.norm()).item()
