"""Launch counting: what the GPU really ran for a piece of code. What reads traces is loaded when it is used."""

from .assertions import LaunchComparison, assert_launches, compare_launches
from .counts import DeviceEvent, LaunchCounts, ProfilerError, device_events, summarise
from .host_counts import HostCountWarning
from .launches import LaunchCapture, capture_events, count_launches

__all__ = [
    "DeviceEvent",
    "HostCountWarning",
    "LaunchCapture",
    "LaunchComparison",
    "LaunchCounts",
    "ProfilerError",
    "assert_launches",
    "capture_events",
    "compare_launches",
    "count_launches",
    "device_events",
    "summarise",
]
