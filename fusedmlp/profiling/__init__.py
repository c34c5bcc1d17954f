"""Launch counting: what the GPU really ran for a piece of code."""

from .launches import (
    DeviceEvent,
    LaunchCapture,
    LaunchCounts,
    ProfilerError,
    capture_events,
    count_launches,
    device_events,
    summarise,
)

__all__ = [
    "DeviceEvent",
    "LaunchCapture",
    "LaunchCounts",
    "ProfilerError",
    "capture_events",
    "count_launches",
    "device_events",
    "summarise",
]
