"""Variants measured together at one case; where one raises it is named, and the others are measured without it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from bench import common
from bench.case import Case
from bench.variants import OPS

WALL_CALLS = 10


def within(value: float, least: int, most: int) -> int:
    return max(least, min(most, int(value)))


def measure(case: Case, pass_: str, metric: str, names: Sequence[str], effort: int, us: float) -> dict[str, Any]:
    """variant -> values. effort: 0 to see whether it works, 1 for a look, 2 for results. us: about a call's time."""
    calls = {v: getattr(case, pass_)(v) for v in names}
    if metric == "wall_us":
        rounds = (1, 6, within(1.5e6 / (WALL_CALLS * us), 8, 40))[effort]
        return common.wall_us(calls, case.sets, rounds, WALL_CALLS)
    if metric == "graph_us":
        replays = 3 * case.sets * us  # of a turn
        rounds = (1, within(0.12e6 / replays, 3, 6), within(0.3e6 / replays, 5, 15))[effort]
        return common.graph_us(calls, case.sets, rounds)
    if metric == "graph_alone_us":
        return common.graph_alone_us(calls, case.sets, (1, 2, 3)[effort])
    if metric == "kernel_us":
        return common.kernel_us(calls, case.sets, (1, 2, 3)[effort])
    if metric == "kernel_alone_us":
        return common.kernel_alone_us(calls, case.sets, (1, 2, 3)[effort])
    if metric == "peak_bytes":
        return {v: common.peak_bytes(c) for v, c in calls.items()}
    if metric == "saved_bytes":
        return {v: common.saved_bytes(case.keep(v)) for v in names}
    if metric == "kernels":
        return {v: common.kernels(c) for v, c in calls.items()}
    return {v: [case.errors(v)[pass_]] for v in names}


class Rows:
    """The rows of a run, and what raised in the place of one.

    Attributes:
        effort: 1 for a look, 2 for results. rows: of :func:`bench.common.row`.
        raised: where -> what. marks: the cells (op, shape, pass, metric, variant) that raised; empty where all did.
    """

    def __init__(self, effort: int = 2) -> None:
        self.effort = effort
        self.rows: list[dict[str, Any]] = []
        self.raised: dict[str, str] = {}
        self.marks: set[tuple[Any, ...]] = set()

    def added(self, case: Case, names: Sequence[str]) -> list[str]:
        """Builds the variants of a case; those that could be built."""
        ready = []
        for name in names:
            try:
                case.add(name)
                ready.append(name)
            except Exception as error:
                self.fault(case.op, case.shape, "", [name], "build", error)
        return ready

    def warmed(self, case: Case, pass_: str, names: Sequence[str]) -> tuple[list[str], float]:
        """First calls; the variants that work, and about how long the longest of them takes, in microseconds."""
        working, us = [], 1.0
        for name in names:
            try:
                us = max(us, case.warm_up(getattr(case, pass_)(name)))
                working.append(name)
            except Exception as error:
                self.fault(case.op, case.shape, pass_, [name], "warm-up", error)
        return working, us

    def metric(self, case: Case, pass_: str, metric: str, names: Sequence[str], us: float) -> None:
        """Measures all variants in turn; where one raises, finds out which, and measures the others."""
        found: dict[str, Any] = {}
        left = list(names)
        for last in (False, True):
            if not left:
                break
            try:
                found = measure(case, pass_, metric, left, self.effort, us)
                break
            except Exception as error:
                guilty = [] if last else self.alone(case, pass_, metric, left, us)
                if not guilty:  # it takes all of them
                    self.fault(case.op, case.shape, pass_, left, metric, error)
                    break
                left = [v for v in left if v not in guilty]
        for name, values in found.items():
            try:
                options = {"bias": OPS[case.op].bias, "dtype": str(case.dtype).removeprefix("torch.")}
                self.rows.append(common.row(case.op, pass_, case.shape, name, metric, values, **options))
            except common.BenchError as error:
                self.fault(case.op, case.shape, pass_, [name], metric, error)

    def alone(self, case: Case, pass_: str, metric: str, names: Sequence[str], us: float) -> list[str]:
        guilty = []
        for name in names:
            try:
                measure(case, pass_, metric, [name], 0, us)
            except Exception as error:
                self.fault(case.op, case.shape, pass_, [name], metric, error)
                guilty.append(name)
        return guilty

    def fault(
        self, op: str, shape: tuple[int, int, int], pass_: str, names: Sequence[str], what: str, error: Exception | str
    ) -> None:
        if isinstance(error, Exception):
            traceback.print_exception(error, limit=-8, file=sys.stderr)
            lines = str(error).strip().splitlines()
            error = f"{type(error).__name__}: {lines[0] if lines else ''}"
        place = " ".join([op, "x".join(map(str, shape)), pass_]).strip()
        for name in names:
            self.raised[f"{name}, {place}, {what}"] = error
            self.marks.add((op, shape, pass_, what if what in common.METRICS else "", name))

    def failed(self, op: str, shape: tuple[int, int, int], pass_: str, metric: str, name: str) -> bool:
        return any((op, shape, p, m, name) in self.marks for p in (pass_, "") for m in (metric, ""))
