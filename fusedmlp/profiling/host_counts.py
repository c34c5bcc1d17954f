"""Count what the host asks for, where there is no device to look at: the operations that compute, and Triton launches.

An operation of ATen that computes is at least one kernel on a device; one that only looks at memory in another way, or
takes some, is none. So the numbers are those of a device where no operation needs several kernels. A function of
torch.compile is counted as the operations that it was compiled from, since PyTorch runs those while a counter watches.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .counts import HOST, HOST_MEANING, LaunchCounts, ProfilerError

# Operations that are no views by their schema and compute nothing all the same.
_NO_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias"}
_NO_WORK |= {"lift_fresh", "set_", "resize_", "is_same_size", "is_pinned", "record_stream", "_local_scalar_dense"}
_NO_WORK |= {"_has_compatible_shallow_copy_type", "equal", "item", "_reshape_alias"}
_BOOKKEEPING = {"profiler", "prim", "inductor", "c10d_functional"}  # operations that are no work of this device
_COPIES = {"copy_", "clone", "_to_copy"}
_FILLS = {"zero_", "zeros", "zeros_like", "new_zeros"}


class HostCountWarning(UserWarning):
    """Launches were counted on the host, for want of a CUDA device."""


def warn_of_host_counts() -> None:
    warnings.warn(f"launches are counted on the host; {HOST_MEANING}", HostCountWarning, stacklevel=3)


class HostCounter(TorchDispatchMode):
    """Counts between start() and stop(), on this thread and those of autograd; ``triton``: launches of Triton too."""

    only_watches = True  # our own layers keep to their kernels

    def __init__(self, triton: bool = True) -> None:
        super().__init__()
        self._triton = triton
        self.names: list[str] = []
        self.copies = 0
        self.fills = 0
        self._restore: Callable[[], None] | None = None

    def start(self) -> None:
        self._restore = _watch_interpreter(self.names) if self._triton else None
        self.__enter__()

    def stop(self) -> LaunchCounts:
        self.__exit__(None, None, None)
        if self._restore is not None:
            self._restore()
        by_name = dict(Counter(self.names).most_common())
        return LaunchCounts(len(self.names), self.copies, self.fills, list(self.names), by_name, source=HOST)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace in ("aten", "prims"):
            self._count(func, args, kwargs)
        elif func.namespace not in _BOOKKEEPING:
            self.names.append(str(func))  # of a library: nobody sees what it does inside
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _COPIES:
            self._count_copy(name, args, kwargs)
        elif name in _FILLS:
            self.fills += 1
        elif not func.is_view and name not in _NO_WORK:
            self.names.append(str(func))

    def _count_copy(self, name: str, args: Any, kwargs: Any) -> None:
        """A copy between dtypes is a kernel, any other a copy of memory."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0].dtype if name == "copy_" else kwargs.get("dtype") or source.dtype
        if isinstance(source, torch.Tensor) and target != source.dtype:
            self.names.append(f"aten.{name} {source.dtype} -> {target}".replace("torch.", ""))
        else:
            self.copies += 1


def composite(func: Any) -> bool:
    """Whether an operation is one of others that autograd has not taken apart, as it does but in inference mode."""
    if not torch.is_inference_mode_enabled():
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _watch_interpreter(names: list[str]) -> Callable[[], None] | None:
    """Note the launches of Triton's interpreter, the only one that runs without a device; its own copies do not count.

    Returns what ends that; None without Triton.
    """
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return None
    plain = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(getattr(self.fn, "__name__", "a Triton kernel"))
        with _disable_current_modes():
            return plain(self, *args, **kwargs)

    def restore() -> None:
        GridExecutor.__call__ = plain

    GridExecutor.__call__ = launch
    return restore


def count_on_host(fn: Callable[[], Any], steps: int = 1) -> LaunchCounts:
    """Counts of one call of ``fn()`` out of ``steps``. Raises ProfilerError where the calls differ."""
    found = []
    for _ in range(steps):
        counter = HostCounter()
        counter.start()
        try:
            fn()
        finally:
            counts = counter.stop()
        found.append(counts)
    if any(counts.by_name != found[0].by_name for counts in found[1:]):
        raise ProfilerError(f"the operations of {steps} calls differ from call to call; raise warmup= or use steps=1")
    return found[0]
