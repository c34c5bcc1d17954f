"""What a trace holds, as records: host operations, calls of the CUDA API, work of the device, profiler steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Op:
    """An operation or a range on the host. Times in microseconds; shapes and dtypes of its tensor arguments, where
    the profile recorded shapes; ``sequence`` links a forward operation to its backward."""

    name: str
    start: float
    duration: float
    thread: int
    shapes: Shapes = ()
    dtypes: tuple[str, ...] = ()
    sequence: int = -1
    parent: Op | None = None

    @property
    def end(self) -> float:
        return self.start + self.duration

    def line(self) -> list[Op]:
        """This operation and those it runs within, innermost first."""
        found: list[Op] = []
        op: Op | None = self
        while op is not None:
            found.append(op)
            op = op.parent
        return found


@dataclass(slots=True)
class ApiCall:
    """A call of the CUDA runtime or driver on the host; times in microseconds."""

    name: str
    start: float
    duration: float
    thread: int
    correlation: int
    op: Op | None = None

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(slots=True)
class Work:
    """One piece of work of a device. ``kind``: "kernel", "memcpy" or "memset". Times in microseconds; ``bytes`` of
    copies and sets; ``call``: what launched it; ``step``: index into Trace.steps, -1 outside of all."""

    name: str
    kind: str
    start: float
    duration: float
    device: int
    stream: int
    correlation: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    bytes: int = 0
    occupancy: float = -1.0
    in_graph: bool = False
    call: ApiCall | None = None
    step: int = -1

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def op(self) -> Op | None:
        return self.call.op if self.call is not None else None


@dataclass(slots=True)
class Step:
    """A step of the profiler's schedule, as the host ran it; times in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass
class Trace:
    """A whole trace. ``work`` is in order of start; ``steps`` has one entry, "whole trace", where the profile had no
    schedule. ``devices``: deviceProperties of the trace."""

    path: str
    steps: list[Step] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[ApiCall] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    events: int = 0
    has_shapes: bool = False
    whole: bool = False  # the steps are not the profiler's own

    @property
    def kernels(self) -> list[Work]:
        return [w for w in self.work if w.kind == "kernel"]

    def by_step(self) -> dict[int, list[Work]]:
        """Index of a step -> the work that it launched, in order of start; -1: what no step launched."""
        found: dict[int, list[Work]] = defaultdict(list)
        for w in self.work:
            found[w.step].append(w)
        return dict(found)


def busy_us(work: Sequence[Work]) -> float:
    """Time in which at least one of them ran, in microseconds; ``work`` in order of start."""
    total, end = 0.0, float("-inf")
    for w in work:
        if w.end <= end:
            continue
        total += w.end - max(w.start, end)
        end = w.end
    return total
