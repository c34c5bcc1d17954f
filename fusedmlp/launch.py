"""Launches Triton kernels with little host work. The only module that touches Triton's private interface.

Two paths. The public one, ``kernel[grid](...)``, specialises, compiles and launches; it serves the first launch of
every :class:`Launch`, and all of them under Triton's interpreter or on a Triton that is not known here. The other
calls the compiled kernel's ``run`` directly, whose arguments are the same in the releases listed in ``_KNOWN``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

_KNOWN = {(3, 5), (3, 6), (3, 7), (3, 8), (3, 9)}


def _version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def interpreting() -> bool:
    """True where Triton's interpreter runs the kernels (``TRITON_INTERPRET=1``), on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


_DIRECT = _version() in _KNOWN


class Launch:
    """One kernel with its grid, compile-time constants and options; callable with the run-time arguments.

    The run-time arguments must be of the same kind at each call (dtypes, alignment, divisibility by 16): whoever
    keeps a Launch keys it by them.
    """

    __slots__ = ("kernel", "grid", "constants", "options", "_run", "_function", "_metadata")

    def __init__(self, kernel: Any, grid: int, constants: tuple[Any, ...], **options: Any) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self.options = options
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def __call__(self, device_index: int | None, *args: Any) -> None:
        """Launch on the current stream of the device, which must be the current one."""
        if self._run is None:
            compiled = self.kernel[(self.grid,)](*args, *self.constants, **self.options)
            if _DIRECT and device_index is not None and compiled is not None:
                self._run = compiled.run
                self._function = compiled.function
                self._metadata = compiled.packed_metadata
            return
        if _hooked():
            self.kernel[(self.grid,)](*args, *self.constants, **self.options)
            return
        stream = torch._C._cuda_getCurrentRawStream(device_index)  # type: ignore[arg-type]
        self._run(self.grid, 1, 1, stream, self._function, self._metadata, None, None, None, *args, *self.constants)


def _hooked() -> bool:
    """A profiler such as Proton hooks launches: let Triton launch then, so that it sees them."""
    hook = triton.knobs.runtime.launch_enter_hook
    if hook is None:
        return False
    calls = getattr(hook, "calls", None)
    return True if calls is None else bool(calls)


_counters: dict[tuple[int, int], Tensor] = {}
COUNTERS = 8  # int32: two for each grid barrier of a kernel, up to four barriers


def barrier_counters(device: torch.device) -> Tensor:
    """int32 zeros for the grid barriers of one kernel, which leaves them zero.

    One buffer a (device, stream): kernels of a stream run in turn. A kernel inside a captured graph gets its own,
    since the graph may be replayed on any stream beside others.
    """
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return found
