"""Timing the right candidates of one shape against each other.

A look at each comes first, and what it shows to be hopeless is not timed further. The others take turns, so that none
of them has the cooler card, as graphs of several calls: a short call then costs the device nothing of its own start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..settings.types import Settings
from .timing import Call, captured, look_us, replays_us, settle_graphs

HOPELESS = 1.5  # times the best look
LEAST_HOPELESS_US = 150.0  # looks at shorter calls may have timed the host, and reject none
GRAPH_US = 300.0  # a graph holds about so much work, or one call on each input set
MOST_CALLS = 48
# Of timed replays a candidate, in microseconds, within these rounds.
BUDGET_US, ROUNDS = 20_000.0, (3, 8)
LONG_US = 5_000.0  # of a replay: one a turn will do then

Times = tuple[Settings, list[float]]
Failed = Callable[[Settings, Exception], None]


def times_of(calls: Sequence[tuple[Settings, Call]], sets: int, failed: Failed) -> list[Times]:
    """Each candidate with its times in microseconds, in the order given; a hopeless one with that of its look alone.

    ``calls`` have run before. One that raises is passed to ``failed``, and the others go on. cuBLAS and a pointwise
    kernel are timed in any case: where they may not serve, the table still says what they take.
    """
    looks: dict[Settings, float] = {}
    for candidate, call in calls:
        try:
            looks[candidate] = look_us(call)
        except Exception as error:  # a candidate that does not run is a result, not an end
            failed(candidate, error)
    kept = _promising(looks)
    us = min((looks[candidate] for candidate in kept), default=1.0)
    found = _in_turn({c: call for c, call in calls if c in kept}, graph_calls(sets, us), failed)
    rejected = {c: [look] for c, look in looks.items() if c not in kept}
    return [(c, times) for c, _ in calls if (times := found.get(c) or rejected.get(c))]


def _promising(looks: dict[Settings, float]) -> list[Settings]:
    """Fused kernels are held against the best of them: it is the choice also where the pair is faster, but may not
    serve."""
    best = min((us for c, us in looks.items() if c.family != "pair"), default=0.0)
    return [c for c, us in looks.items() if c.family == "pair" or us <= max(HOPELESS * best, LEAST_HOPELESS_US)]


def graph_calls(sets: int, us: float) -> int:
    """Calls in a graph: every set as often, of calls that take about ``us``."""
    return sets * max(1, min(MOST_CALLS // sets, math.ceil(GRAPH_US / (sets * us))))


def _in_turn(calls: dict[Settings, Call], each: int, failed: Failed) -> dict[Settings, list[float]]:
    try:
        return _replayed(calls, each)
    except Exception as error:
        if len(calls) < 2:
            for candidate in calls:
                failed(candidate, error)
            return {}
    found: dict[Settings, list[float]] = {}
    for candidate, call in calls.items():  # one of them it is, or all were too much at once
        found |= _in_turn({candidate: call}, each, failed)
    return found


def _replayed(calls: dict[Settings, Call], each: int) -> dict[Settings, list[float]]:
    if not calls:
        return {}
    graphs = captured(calls, each)
    once = settle_graphs(graphs)
    least, most = ROUNDS
    if once > LONG_US:
        return replays_us(graphs, each, rounds=least, timed=1, lead=0)
    return replays_us(graphs, each, max(least, min(most, int(BUDGET_US / (3 * once)))))
