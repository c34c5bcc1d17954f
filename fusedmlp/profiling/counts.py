"""What was launched: the records, and the arithmetic from profiler events to numbers per call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import DeviceType

DEVICE, HOST = "device", "host"
HOST_MEANING = "no CUDA device: dispatched ATen operations and Triton launches"
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
    kernels, in microseconds (profiled, so a little above an unprofiled run). source: "device", or "host" where there
    is no CUDA device: then these are the compute operations that PyTorch dispatched and the Triton kernels that were
    launched, which is what the device would have been asked to do at the least, and there are no times.
    """

    kernels: int
    memcpy: int
    memset: int
    names: list[str] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    kernel_us: float = 0.0
    source: str = DEVICE

    def __str__(self) -> str:
        lines = [f"{self.kernels} kernels, {self.memcpy} memcpy, {self.memset} memset, {self.kernel_us:.1f} us"]
        if self.source == HOST:
            lines = [f"{self.kernels} compute operations, {self.memcpy} copies, {self.memset} fills ({HOST_MEANING})"]
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
