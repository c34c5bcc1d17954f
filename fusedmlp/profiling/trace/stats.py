"""Numbers of a trace: launches and times of each step, who waits for whom, and the kernels by name."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..names import KernelName, decode
from ..names.ours import in_context
from .model import ApiCall, Op, Step, Trace, Work, busy_us

SMALL_US = 5.0  # a kernel that costs the device less than its launch costs the host
GAP_US = 1.0  # a shorter pause between kernels is the device's own
_STALLS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"}
_STALLS |= {"cuCtxSynchronize", "cuEventSynchronize", "cudaMemcpy", "hipStreamSynchronize", "hipDeviceSynchronize"}
_NOT_LAUNCHES = ("Synchronize", "Query", "GetLastError", "StreamWait", "EventRecord", "Occupancy", "Capture", "Malloc")


@dataclass(frozen=True)
class StepStats:
    """One step; times in microseconds. kernel_us: sum over kernels. busy_us, idle_us: of the device between its first
    and last work of the step. waiting_us: the part of idle_us in which it waited for the host to launch something.
    launch_us: time of the host inside calls that launched work."""

    name: str
    kernels: int
    memcpy: int
    memset: int
    host_us: float
    kernel_us: float
    busy_us: float
    idle_us: float
    waiting_us: float
    launch_us: float

    @property
    def span_us(self) -> float:
        return self.busy_us + self.idle_us


@dataclass(frozen=True)
class KernelStats:
    """Kernels of one name, in all steps; times in microseconds; share: of all kernel time; op: the operation on the
    host that launched it most often; shapes: of that operation's inputs."""

    name: str
    decoded: KernelName
    count: int
    total_us: float
    share: float
    op: str
    shapes: str


@dataclass(frozen=True)
class Stretch:
    """A stretch in which the device waited again and again for the host: from ``start_us`` (since the first event) for
    ``length_us``, of which it was idle for ``idle_us`` around ``kernels`` kernels; ``op``: the host in the longest
    pause."""

    step: str
    start_us: float
    length_us: float
    idle_us: float
    kernels: int
    op: str


@dataclass(frozen=True)
class Stall:
    """Calls in which the host waited for the device. Times in microseconds."""

    call: str
    op: str
    count: int
    total_us: float


@dataclass
class TraceStats:
    """All numbers of a trace. idle and busy as in StepStats, over the whole trace. launch_call_us, launch_delay_us:
    medians of the host's time in a call that launches, and of the time from its return to the start of the work."""

    steps: list[StepStats]
    kernels: list[KernelStats]
    stretches: list[Stretch]
    stalls: list[Stall]
    busy_us: float
    idle_us: float
    kernel_us: float
    launches: int
    launch_call_us: float
    launch_delay_us: float
    graph_launches: int
    small_kernels: int
    small_us: float
    occupancy_queries: int
    occupancy_query_us: float
    named_share: float
    streams: int
    devices: int
    copies: dict[str, tuple[int, float, int]] = field(default_factory=dict)

    @property
    def alike(self) -> bool:
        """Whether all steps launched the same number of kernels."""
        return len({s.kernels for s in self.steps}) <= 1


def analyse(trace: Trace) -> TraceStats:
    """The numbers of a trace. Work that no step launched (a schedule's warm-up) counts for the whole alone."""
    kernels = trace.kernels
    kernel_us = sum(w.duration for w in kernels)
    launching = _launching_calls(trace)
    delays = [max(0.0, w.start - w.call.end) for w in trace.work if w.call is not None and w.call.name]
    small = [w.duration for w in kernels if w.duration < SMALL_US]
    occupancy = [c.duration for c in trace.calls if "Occupancy" in c.name]
    by_device = [[w for w in trace.work if w.device == d] for d in sorted({w.device for w in trace.work})]
    waits = [gap for work in by_device for gap in _waits(work)]
    return TraceStats(
        steps=_steps(trace, launching, waits),
        kernels=_by_name(kernels, kernel_us),
        stretches=_stretches(trace, waits),
        stalls=_stalls(trace),
        busy_us=sum(busy_us(work) for work in by_device),
        idle_us=sum(_idle_us(work) for work in by_device),
        kernel_us=kernel_us,
        launches=len(launching),
        launch_call_us=statistics.median([c.duration for c in launching]) if launching else 0.0,
        launch_delay_us=statistics.median(delays) if delays else 0.0,
        graph_launches=sum("GraphLaunch" in c.name for c in trace.calls),
        small_kernels=len(small),
        small_us=sum(small),
        occupancy_queries=len(occupancy),
        occupancy_query_us=sum(occupancy),
        named_share=sum(w.duration for w in kernels if decode(w.name).known) / kernel_us if kernel_us else 1.0,
        streams=len({(w.device, w.stream) for w in trace.work}),
        devices=len(by_device),
        copies=_copies(trace.work),
    )


def _launching_calls(trace: Trace) -> list[ApiCall]:
    """Calls that put work on the device, each once."""
    found = {id(w.call): w.call for w in trace.work if w.call is not None and w.call.name}
    return [c for c in found.values() if not any(part in c.name for part in _NOT_LAUNCHES)]


def _idle_us(work: Sequence[Work]) -> float:
    if not work:
        return 0.0
    return max(w.end for w in work) - work[0].start - busy_us(work)


@dataclass(frozen=True)
class _Wait:
    """The device was idle from ``start`` on until ``work`` came, whose launch began only then."""

    start: float
    work: Work

    @property
    def us(self) -> float:
        return self.work.start - self.start


def _waits(work: Sequence[Work]) -> list[_Wait]:
    """Pauses of one device in which it had nothing left to do: the next launch began, or returned, after its end."""
    found, end = [], None
    for w in work:
        if end is not None and w.start - end > GAP_US and w.call is not None and w.call.end > end:
            found.append(_Wait(end, w))
        end = w.end if end is None else max(end, w.end)
    return found


def _steps(trace: Trace, launching: Sequence[ApiCall], waits: Sequence[_Wait]) -> list[StepStats]:
    work = trace.by_step()
    waited: dict[int, list[_Wait]] = defaultdict(list)
    for wait in waits:
        waited[wait.work.step].append(wait)
    calls = sorted(launching, key=lambda c: c.start)
    starts = [c.start for c in calls]
    found = []
    for i, step in enumerate(trace.steps):
        inside = calls[bisect.bisect_left(starts, step.start) : bisect.bisect_right(starts, step.end)]
        found.append(_step(step, work.get(i, []), inside, waited[i]))
    return found


def _step(step: Step, work: Sequence[Work], launching: Sequence[ApiCall], waits: Sequence[_Wait]) -> StepStats:
    kinds = [w.kind for w in work]
    by_device = [[w for w in work if w.device == d] for d in {w.device for w in work}]
    first = {part[0].device: part[0].start for part in by_device}
    return StepStats(
        name=step.name,
        kernels=kinds.count("kernel"),
        memcpy=kinds.count("memcpy"),
        memset=kinds.count("memset"),
        host_us=step.duration,
        kernel_us=sum(w.duration for w in work if w.kind == "kernel"),
        busy_us=sum(busy_us(part) for part in by_device),
        idle_us=sum(_idle_us(part) for part in by_device),
        # The pause before a device's first work of a step is none of the step's.
        waiting_us=sum(wait.us for wait in waits if wait.start >= first[wait.work.device]),
        launch_us=sum(c.duration for c in launching),
    )


def _by_name(kernels: Sequence[Work], total: float) -> list[KernelStats]:
    groups: dict[str, list[Work]] = defaultdict(list)
    for w in kernels:
        groups[w.name].append(w)
    found = []
    for name, same in groups.items():
        us = sum(w.duration for w in same)
        ops = [w.op for w in same if w.op is not None]
        op = statistics.mode([o.name for o in ops]) if ops else ""
        shapes = next((_shapes(o) for o in ops if o.name == op and o.shapes), "")
        found.append(KernelStats(name, _decoded(same[0]), len(same), us, us / total if total else 0.0, op, shapes))
    return sorted(found, key=lambda k: -k.total_us)


def _decoded(work: Work) -> KernelName:
    name = decode(work.name)
    if name.library != "fusedmlp":
        return name
    shapes = work.op.shapes if work.op is not None and work.op.name == "Fused" else ()
    return in_context(name, shapes, work.grid, work.block)


def _shapes(op: Op) -> str:
    return " ".join(str(list(s)) for s in op.shapes if s)


def _stretches(trace: Trace, waits: Sequence[_Wait]) -> list[Stretch]:
    """Waits of one step that follow each other with hardly any work between them, as one; the longest first."""
    runs: list[list[_Wait]] = []
    for gap in sorted(waits, key=lambda g: g.start):
        same_step = bool(runs) and runs[-1][-1].work.step == gap.work.step
        # Less work between two waits than either of them is long: still the same stretch.
        if same_step and gap.start - runs[-1][-1].work.start <= max(gap.us, runs[-1][-1].us):
            runs[-1].append(gap)
        else:
            runs.append([gap])
    origin = min((s.start for s in trace.steps), default=0.0)
    found = []
    for run in runs:
        longest = max(run, key=lambda g: g.us)
        op = longest.work.op.line()[-1].name if longest.work.op is not None else ""
        step = trace.steps[run[0].work.step].name if run[0].work.step >= 0 else ""
        length = run[-1].work.start - run[0].start
        found.append(Stretch(step, run[0].start - origin, length, sum(g.us for g in run), len(run), op))
    return sorted(found, key=lambda s: -s.idle_us)


def _stalls(trace: Trace) -> list[Stall]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for call in trace.calls:
        if call.name in _STALLS:
            op = call.op.name if call.op is not None else ""
            groups[call.name, op].append(call.duration)
    found = [Stall(name, op, len(us), sum(us)) for (name, op), us in groups.items()]
    return sorted(found, key=lambda s: -s.total_us)


def _copies(work: Sequence[Work]) -> dict[str, tuple[int, float, int]]:
    """Name of a copy or set -> how often, microseconds, bytes."""
    groups: dict[str, list[Work]] = defaultdict(list)
    for w in work:
        if w.kind != "kernel":
            groups[w.name].append(w)
    return {
        name: (len(same), sum(w.duration for w in same), sum(w.bytes for w in same)) for name, same in groups.items()
    }
