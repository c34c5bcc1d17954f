"""Count the device kernels of a block of code.

The numbers come from the GPU side of ``torch.profiler`` (the kernel records of CUPTI), not from the names of
host API calls: a CUDA graph replay, a cuBLAS call that splits K and a kernel launched by the autograd thread
all show up as what the device ran.

A profiler that starts late or drops its buffers reports too few kernels without any error. So every capture
is framed by two probe kernels: a capture in which both are present is complete, any other is thrown away.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_NOT_WORK = {"gpu_user_annotation", "user_annotation", "cuda_sync", "cuda_profiler_range", "overhead"}
_SYNC_NAMES = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


class ProfilerError(RuntimeError):
    """The launches could not be counted (no CUDA device, or a capture that cannot be trusted)."""


@dataclass(frozen=True)
class DeviceEvent:
    """One piece of work that the device ran. ``kind`` is "kernel", "memcpy" or "memset"; times in
    microseconds."""

    name: str
    kind: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class LaunchCounts:
    """What the device ran for one call.

    kernels, memcpy, memset: how many of each, per call. names: kernel names in the order in which the device
    started them. by_name: kernel name -> how often, most frequent first. kernel_us: summed device time of the
    kernels, in microseconds (profiled, so a little above an unprofiled run).
    """

    kernels: int
    memcpy: int
    memset: int
    names: list[str] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    kernel_us: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.kernels} kernels, {self.memcpy} memcpy, {self.memset} memset, {self.kernel_us:.1f} us"]
        lines += [f"  {n:3d} x {name[:90]}" for name, n in self.by_name.items()]
        return "\n".join(lines)


def _kind(event: Any) -> str | None:
    """ "kernel", "memcpy" or "memset" for an event of torch.profiler that is device work, else None."""
    if event.device_type != DeviceType.CUDA:
        return None
    # Ranges of record_function() and of the profiler's own steps are mirrored onto the device's time line.
    # PyTorch marks them; newer releases also say the activity of every event.
    if getattr(event, "is_user_annotation", False) or getattr(event, "activity_type", None) in _NOT_WORK:
        return None
    name = event.name
    if name.startswith("Memcpy"):
        return "memcpy"
    if name.startswith("Memset"):
        return "memset"
    if name.startswith(("ProfilerStep", *_SYNC_NAMES)):
        return None
    return "kernel"


def device_events(events: Iterable[Any]) -> list[DeviceEvent]:
    """The device work among the events of ``torch.profiler.profile.events()``, in the order in which it
    started."""
    found = [
        DeviceEvent(e.name, kind, float(e.time_range.start), float(e.time_range.end - e.time_range.start))
        for e in events
        if (kind := _kind(e)) is not None
    ]
    return sorted(found, key=lambda e: e.start_us)


def _per_call(total: int, steps: int, what: str) -> int:
    if total % steps:
        raise ProfilerError(
            f"{total} {what} in {steps} calls: the calls are not alike, so there is no number per call. "
            "Raise warmup= until the code is in its steady state, or count one call with steps=1."
        )
    return total // steps


def summarise(events: Iterable[Any], steps: int = 1) -> LaunchCounts:
    """Counts for one call out of the profiler events, or DeviceEvents, of ``steps`` equal calls.

    Raises ProfilerError where the calls are not alike, ValueError where ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    listed = list(events)
    work = listed if all(isinstance(e, DeviceEvent) for e in listed) else device_events(listed)
    kernels = [e for e in work if e.kind == "kernel"]
    size = _per_call(len(kernels), steps, "kernels")
    calls = [[e.name for e in kernels[i * size : (i + 1) * size]] for i in range(steps)]
    if any(Counter(call) != Counter(calls[0]) for call in calls[1:]):
        raise ProfilerError(f"the kernels of {steps} calls differ from call to call; raise warmup= or use steps=1")
    return LaunchCounts(
        kernels=size,
        memcpy=_per_call(sum(e.kind == "memcpy" for e in work), steps, "memcpy"),
        memset=_per_call(sum(e.kind == "memset" for e in work), steps, "memset"),
        names=calls[0],
        by_name=dict(Counter(calls[0]).most_common()),
        kernel_us=sum(e.duration_us for e in kernels) / steps,
    )


def _need_cuda() -> None:
    if torch.cuda.is_available():
        return
    built = torch.version.cuda or torch.version.hip
    why = "no device is visible to this process" if built else "this PyTorch is built without CUDA"
    raise ProfilerError(f"counting launches needs a CUDA device: {why} (torch {torch.__version__})")


class _Frame:
    """A profiler session with a probe kernel before and after the block.

    Both probes are separated from the block by a synchronisation, so they are the first and the last kernel
    whatever streams the block uses.
    """

    def __init__(self) -> None:
        self._probe = torch.zeros(1, device="cuda", dtype=torch.float64)
        # Device activity alone: host records would slow the block down and are not needed.
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def _run_probe(self) -> None:
        torch.cuda.synchronize()
        self._probe.erfinv_()  # a kernel that hardly any block runs itself
        torch.cuda.synchronize()

    def start(self) -> None:
        if torch.autograd._profiler_enabled():
            raise ProfilerError("another profiler is already running in this process; end it before counting launches")
        torch.cuda.synchronize()
        self._profile.start()
        self._run_probe()

    def abort(self) -> None:
        self._profile.stop()

    def finish(self) -> list[DeviceEvent]:
        """Everything that the device ran, the probes included."""
        self._run_probe()
        self._profile.stop()
        return device_events(self._profile.events() or [])


@functools.cache
def _probe_name(device_index: int) -> str:
    """Name of the probe kernel, learnt from captures of nothing else: this proves that kernels are visible at
    all."""
    for _ in range(5):
        frame = _Frame()
        frame.start()
        seen = [e.name for e in frame.finish() if e.kind == "kernel"]
        if len(seen) == 2 and seen[0] == seen[1]:
            return seen[0]
    raise ProfilerError(
        f"torch.profiler shows no kernels of cuda:{device_index} (a probe kernel stayed unseen in 5 "
        "captures). Usual "
        "causes: another CUPTI client (Nsight, DCGM, a debugger) is attached, or CUPTI is missing from this "
        "machine."
    )


def _unframed(events: list[DeviceEvent], probe: str) -> list[DeviceEvent] | None:
    """The events between the two probes, or None where the capture is not complete."""
    at = [i for i, e in enumerate(events) if e.kind == "kernel"]
    if len(at) < 2 or events[at[0]].name != probe or events[at[-1]].name != probe:
        return None
    return events[at[0] + 1 : at[-1]]


def capture_events(fn: Callable[[], Any], attempts: int = 5) -> list[DeviceEvent]:
    """Device work of one run of ``fn()``, in start order; runs it again (up to ``attempts`` times) while the
    capture is not complete. May be empty. Raises ProfilerError without a CUDA device or without a complete
    capture."""
    _need_cuda()
    probe = _probe_name(torch.cuda.current_device())
    for _ in range(attempts):
        frame = _Frame()
        frame.start()
        try:
            fn()
        except BaseException:
            frame.abort()
            raise
        events = _unframed(frame.finish(), probe)
        if events is not None:
            return events
    raise ProfilerError(f"torch.profiler lost part of the capture in each of {attempts} attempts; nothing was counted")


class LaunchCapture:
    """Context manager of count_launches(): after the block it has the attributes of LaunchCounts.

    The block runs once, as it is: run it a few times before, or first calls (compilation, cuBLAS workspaces)
    count too.
    """

    def __init__(self, allow_empty: bool = False) -> None:
        self._allow_empty = allow_empty
        self._frame: _Frame | None = None
        self._counts: LaunchCounts | None = None

    def __enter__(self) -> LaunchCapture:
        _need_cuda()
        self._probe = _probe_name(torch.cuda.current_device())
        self._frame = _Frame()
        self._frame.start()
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> None:
        frame, self._frame = self._frame, None
        if frame is None:
            return
        if exc_type is not None:
            frame.abort()
            return
        events = _unframed(frame.finish(), self._probe)
        if events is None:
            raise ProfilerError(
                "torch.profiler lost part of this capture; run the block again, or pass the code as a "
                "function, "
                "count_launches(fn), which tries again by itself"
            )
        self._counts = _checked(summarise(events), self._allow_empty)

    @property
    def counts(self) -> LaunchCounts:
        if self._counts is None:
            raise ProfilerError("the counts exist once the `with count_launches()` block has ended without an error")
        return self._counts

    @property
    def kernels(self) -> int:
        return self.counts.kernels

    @property
    def memcpy(self) -> int:
        return self.counts.memcpy

    @property
    def memset(self) -> int:
        return self.counts.memset

    @property
    def names(self) -> list[str]:
        return self.counts.names

    @property
    def by_name(self) -> dict[str, int]:
        return self.counts.by_name

    @property
    def kernel_us(self) -> float:
        return self.counts.kernel_us


def _checked(counts: LaunchCounts, allow_empty: bool) -> LaunchCounts:
    if allow_empty or counts.kernels or counts.memcpy or counts.memset:
        return counts
    raise ProfilerError(
        "the device ran nothing for this code, although the profiler saw its own probe kernels around it. "
        "Are the "
        "tensors on the GPU? Pass allow_empty=True where zero launches are a right answer."
    )


@overload
def count_launches(fn: None = None, *, allow_empty: bool = ...) -> LaunchCapture: ...
@overload
def count_launches(
    fn: Callable[[], Any],
    *,
    warmup: int = ...,
    steps: int = ...,
    attempts: int = ...,
    allow_empty: bool = ...,
) -> LaunchCounts: ...
def count_launches(
    fn: Callable[[], Any] | None = None,
    *,
    warmup: int = 3,
    steps: int = 1,
    attempts: int = 5,
    allow_empty: bool = False,
) -> LaunchCounts | LaunchCapture:
    """Count the device kernels of one steady-state call of ``fn()``.

    fn: called ``warmup + steps`` times, more where a capture has to be repeated. Without ``fn`` this is a
    context manager, ``with count_launches() as c: ...``, whose ``c.kernels`` and so on exist after the block.
    warmup: calls before the count. steps: counted calls; they must be alike, and the counts are per call.
    attempts: captures to try while the profiler loses events. allow_empty: accept a call that launches
    nothing.

    Raises ProfilerError without a CUDA device, with no complete capture, with counted calls that differ, and
    where the device ran nothing (unless ``allow_empty``).
    """
    if fn is None:
        return LaunchCapture(allow_empty)
    if not callable(fn):
        raise TypeError(f"count_launches() takes a function without arguments, got {type(fn).__name__}")
    if warmup < 0 or steps < 1 or attempts < 1:
        raise ValueError(f"warmup >= 0, steps >= 1 and attempts >= 1 are needed, got {warmup}, {steps} and {attempts}")
    _need_cuda()
    for _ in range(warmup):
        fn()

    def all_steps() -> None:
        for _ in range(steps):
            fn()

    for attempt in range(attempts):
        counts = summarise(capture_events(all_steps, attempts), steps)
        if counts.kernels or counts.memcpy or counts.memset or attempt == attempts - 1:
            break
    return _checked(counts, allow_empty)
