"""From the events of a Chrome trace to a Trace: what launched what, in which step, within which operation."""

from __future__ import annotations

import bisect
import gc
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .model import ApiCall, Op, Shapes, Step, Trace, Work
from .stream import TraceError, read_events

_WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_API = {"cuda_runtime", "cuda_driver"}
_OPS = {"cpu_op", "user_annotation"}
_STEP = re.compile(r"ProfilerStep#\d+$")
# Older profilers write categories with capitals and with the device's name.
_RENAMED = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime"}
_RENAMED |= {"cpu_operator": "cpu_op", "Operator": "cpu_op"}


def load(path: str | Path, progress: Callable[[int], Any] | None = None) -> Trace:
    """Read a trace of torch.profiler, ``.json`` or ``.json.gz``; ``progress`` is told the bytes read so far.

    Raises TraceError, with what is wrong, where the file is no such trace.
    """
    reader = _Reader(str(path))
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of new records and not one cycle: looking for some is a third of the time
    try:
        for event in read_events(path, reader.head, progress):
            reader.add(event)
        return reader.finish()
    finally:
        if collecting:
            gc.enable()


class _Reader:
    def __init__(self, path: str) -> None:
        self.trace = Trace(path)
        self._names: dict[str, str] = {}
        self._shapes: dict[str, Shapes] = {}
        self._dtypes: dict[str, tuple[str, ...]] = {}
        self._by_external: dict[int, Op] = {}
        self._external: dict[int, int] = {}  # index of a work item -> its External id

    def head(self, name: str, value: Any) -> None:
        if name == "deviceProperties" and isinstance(value, list):
            self.trace.devices = [d for d in value if isinstance(d, dict)]

    def _name(self, text: Any) -> str:
        text = str(text)
        return self._names.setdefault(text, text)

    def add(self, event: dict[str, Any]) -> None:
        self.trace.events += 1
        if event.get("ph") != "X":
            return
        category = str(event.get("cat", ""))
        category = _RENAMED.get(category, category)
        if category not in _WORK and category not in _API and category not in _OPS:
            return
        try:
            self._keep(category, event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TraceError(
                f"{self.trace.path}: event {self.trace.events} ({event.get('name')!r}) has fields that torch.profiler "
                f"does not write: {error}"
            ) from error

    def _keep(self, category: str, event: dict[str, Any]) -> None:
        args = event.get("args") or {}
        name, start, duration = (
            self._name(event.get("name", "")),
            _time(event["ts"]),
            max(0.0, _time(event.get("dur", 0))),
        )
        if category in _WORK:
            self._keep_work(_WORK[category], name, start, duration, event, args)
            return
        thread = _number(event.get("tid", 0))
        if category in _API:
            correlation = _number(args.get("correlation", -1))
            self.trace.calls.append(ApiCall(name, start, duration, thread, correlation))
            return
        if _STEP.match(name):  # an operation in older profiles, an annotation since
            self.trace.steps.append(Step(name, start, duration))
            return
        op = Op(name, start, duration, thread, *self._arguments(args), _number(args.get("Sequence number", -1)))
        self.trace.ops.append(op)
        external = args.get("External id")
        if external is not None and category == "cpu_op":
            self._by_external[_number(external)] = op

    def _keep_work(
        self, kind: str, name: str, start: float, duration: float, event: dict[str, Any], args: dict[str, Any]
    ) -> None:
        in_graph = bool(_number(args.get("graph node id", 0)) or _number(args.get("graph id", 0)))
        work = Work(
            name,
            kind,
            start,
            duration,
            _number(args.get("device", event.get("pid", 0))),
            _number(args.get("stream", event.get("tid", 0))),
            _number(args.get("correlation", -1)),
            tuple(map(int, args.get("grid") or ())),
            tuple(map(int, args.get("block") or ())),
            _number(args.get("bytes", 0)),
            float(args.get("est. achieved occupancy %", -1)),
            in_graph,
        )
        external = args.get("External id")
        if external is not None:
            self._external[id(work)] = _number(external)
        self.trace.work.append(work)

    def _arguments(self, args: dict[str, Any]) -> tuple[Shapes, tuple[str, ...]]:
        dims, types = args.get("Input Dims"), args.get("Input type")
        if not dims:
            return (), ()
        self.trace.has_shapes = True
        key, kinds = str(dims), str(types)
        if key not in self._shapes:
            self._shapes[key] = tuple(_shape(d) for d in dims)
        if kinds not in self._dtypes:
            self._dtypes[kinds] = tuple(map(str, types or ()))
        return self._shapes[key], self._dtypes[kinds]

    def finish(self) -> Trace:
        trace = self.trace
        if not (trace.ops or trace.work or trace.calls):
            raise TraceError(
                f"{trace.path}: no events of torch.profiler among {trace.events} events; "
                "give a file that torch.profiler.profile.export_chrome_trace() wrote"
            )
        trace.work.sort(key=lambda w: w.start)
        trace.steps.sort(key=lambda s: s.start)
        _nest(trace)
        self._link()
        _assign_steps(trace)
        return trace

    def _link(self) -> None:
        """Work to the call that launched it; where the trace lacks the call, to the operation alone."""
        calls = {c.correlation: c for c in self.trace.calls if c.correlation > 0}
        for work in self.trace.work:
            work.call = calls.get(work.correlation)
            op = self._by_external.get(self._external.get(id(work), -1))
            if work.call is None and op is not None:
                work.call = ApiCall("", op.start, 0.0, op.thread, work.correlation, op)
            if work.call is not None and work.call.op is None:
                work.call.op = op


def _time(value: Any) -> float:
    """Microseconds, below a million years."""
    time = float(value)
    if not abs(time) < 3e19:
        raise ValueError(f"{value!r} is no time")
    return time


def _number(value: Any) -> int:
    """An integer field; profilers write some of them as text ("stream 7")."""
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value)
    digits = re.findall(r"-?\d+", str(value))
    return int(digits[-1]) if digits else -1


def _shape(dims: Any) -> tuple[int, ...]:
    found = tuple(d for d in dims if isinstance(d, int)) if isinstance(dims, list) else ()
    if any(d >= 2**63 for d in found):
        raise ValueError("a dimension of 2**63 or more")
    return found


def _nest(trace: Trace) -> None:
    """Give every operation the one it runs within, and every call the innermost operation around it."""
    threads: dict[int, list[Op | ApiCall]] = defaultdict(list)
    for op in trace.ops:
        threads[op.thread].append(op)
    for call in trace.calls:
        threads[call.thread].append(call)
    for events in threads.values():
        events.sort(key=lambda e: (e.start, -e.duration))
        stack: list[Op] = []
        for event in events:
            # A little slack: the profiler rounds, so that a child may seem to end behind its parent.
            while stack and event.start >= stack[-1].end:
                stack.pop()
            if isinstance(event, Op):
                event.parent = stack[-1] if stack else None
                stack.append(event)
            else:
                event.op = stack[-1] if stack else None


def _assign_steps(trace: Trace) -> None:
    """Each piece of work belongs to the step that launched it, else to the one in which it ran."""
    if not trace.steps:
        trace.whole = True
        groups: list[list[Any]] = [trace.ops, trace.calls, trace.work]
        first = min(e.start for group in groups for e in group)
        last = max(e.end for group in groups for e in group)
        trace.steps = [Step("whole trace", first, last - first)]
    starts = [s.start for s in trace.steps]
    for work in trace.work:
        at = work.call.start if work.call is not None else work.start
        i = bisect.bisect_right(starts, at) - 1
        if i >= 0 and (at <= trace.steps[i].end or trace.whole):
            work.step = i
