"""Launch counting: what the GPU really ran for a piece of code. What reads traces is loaded when it is used."""

from .assertions import LaunchComparison, assert_launches, compare_launches
from .counts import DeviceEvent, LaunchCounts, ProfilerError, device_events, summarise
from .graph_nodes import GraphCountError, NodeCounts, count_graph_nodes
from .host_counts import HostCountWarning
from .launches import LaunchCapture, capture_events, count_launches
from .record import record_trace

__all__ = [
    "DeviceEvent",
    "GraphCountError",
    "HostCountWarning",
    "LaunchCapture",
    "LaunchComparison",
    "LaunchCounts",
    "NodeCounts",
    "ProfilerError",
    "assert_launches",
    "capture_events",
    "compare_launches",
    "count_graph_nodes",
    "count_launches",
    "device_events",
    "record_trace",
    "summarise",
]
