"""Count the device kernels of a block of code.

The numbers come from the GPU side of ``torch.profiler`` (the kernel records of CUPTI), not from the names of
host API calls: a CUDA graph replay, a cuBLAS call that splits K and a kernel launched by the autograd thread
all show up as what the device ran.

A profiler that starts late or drops its buffers reports too few kernels without any error. So every capture
is framed by two probe kernels: a capture in which both are present is complete, any other is thrown away.

Without a CUDA device the host is counted instead, see :mod:`.host_counts`; the counts and a warning say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.profiler import ProfilerActivity, profile

from .counts import HOST, DeviceEvent, LaunchCounts, ProfilerError, device_events, summarise
from .host_counts import HostCounter, count_on_host, warn_of_host_counts


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
        f"torch.profiler shows no kernels of cuda:{device_index} (a probe kernel stayed unseen in 5 captures). Usual "
        "causes: another CUPTI client (Nsight, DCGM, a debugger) is attached, or CUPTI is missing from this machine."
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
        self._host: HostCounter | None = None
        self._counts: LaunchCounts | None = None

    def __enter__(self) -> LaunchCapture:
        self._counts = None
        if not torch.cuda.is_available():
            warn_of_host_counts()
            self._host = HostCounter()
            self._host.start()
            return self
        self._probe = _probe_name(torch.cuda.current_device())
        self._frame = _Frame()
        self._frame.start()
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> None:
        frame, self._frame = self._frame, None
        host, self._host = self._host, None
        if host is not None:
            counts = host.stop()
            self._counts = None if exc_type is not None else _checked(counts, self._allow_empty)
            return
        if frame is None:
            return
        if exc_type is not None:
            frame.abort()
            return
        events = _unframed(frame.finish(), self._probe)
        if events is None:
            raise ProfilerError(
                "torch.profiler lost part of this capture; run the block again, or pass the code as a function, "
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
    if counts.source == HOST:
        raise ProfilerError(
            "no operation that computes was dispatched; pass allow_empty=True where zero launches are a right answer"
        )
    raise ProfilerError(
        "the device ran nothing for this code, although the profiler saw its own probe kernels around it. "
        "Are the tensors on the GPU? Pass allow_empty=True where zero launches are a right answer."
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
    """Count the device kernels of one steady-state call of ``fn()``; without a CUDA device, the operations that the
    host dispatched (``counts.source`` is then "host", and a HostCountWarning says so).

    fn: called ``warmup + steps`` times, more where a capture has to be repeated. Without ``fn`` this is a
    context manager, ``with count_launches() as c: ...``, whose ``c.kernels`` and so on exist after the block.
    warmup: calls before the count. steps: counted calls; they must be alike, and the counts are per call.
    attempts: captures to try while the profiler loses events. allow_empty: accept a call that launches
    nothing.

    Raises ProfilerError with no complete capture, with counted calls that differ, and where nothing was launched
    (unless ``allow_empty``).
    """
    if fn is None:
        return LaunchCapture(allow_empty)
    if not callable(fn):
        raise TypeError(f"count_launches() takes a function without arguments, got {type(fn).__name__}")
    if warmup < 0 or steps < 1 or attempts < 1:
        raise ValueError(f"warmup >= 0, steps >= 1 and attempts >= 1 are needed, got {warmup}, {steps} and {attempts}")
    for _ in range(warmup):
        fn()
    if not torch.cuda.is_available():
        warn_of_host_counts()
        return _checked(count_on_host(fn, steps), allow_empty)

    def all_steps() -> None:
        for _ in range(steps):
            fn()

    for attempt in range(attempts):
        counts = summarise(capture_events(all_steps, attempts), steps)
        if counts.kernels or counts.memcpy or counts.memset or attempt == attempts - 1:
            break
    return _checked(counts, allow_empty)
