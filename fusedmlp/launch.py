"""Launches Triton kernels with little host work. The only module that touches Triton's private interface.

Four paths, chosen once for each :class:`Launch`:

* public: ``kernel[grid](...)`` specialises, compiles and launches. The first launch of each, and all of them under
  Triton's interpreter, on a Triton that is not known here, and while a launch hook (Proton) is installed.
* compiled: a plan of ``fusedmlp._launcher`` (csrc/launcher.c), where it was built and the kernel's parameters are
  what this module takes them to be.
* raw, without the compiled launcher: Triton's C function (``_RAW``), which takes addresses and encoded tensor maps.
  Maps are kept by the address they describe, and whole argument lists by their addresses.
* run, for the other releases (``_RUN``): the compiled kernel's ``run``, whose arguments are the same in all of them.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import _C, Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import record
from .settings.device import triton_version

_launcher: Any = None
try:
    if os.environ.get("FUSEDMLP_LAUNCHER", "") != "triton":
        from . import _launcher  # type: ignore[no-redef]
except ImportError:  # not built: no compiler where the package was installed
    pass

_RUN = {(3, 5), (3, 6), (3, 7), (3, 8), (3, 9)}
_RAW = {(3, 5), (3, 6)}
MAX_MAPS = 1024  # tensor maps kept for one argument; an allocator hands out the same addresses again and again

_VERSION = triton_version()
_runtime = triton.knobs.runtime
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}


def interpreting() -> bool:
    """True where Triton's interpreter runs the kernels (``TRITON_INTERPRET=1``), on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    """How an argument is seen through a TMA descriptor: sizes and strides in elements, the box of one access.

    ``offset`` is where the view starts in the tensor that is passed. For a pair of tensors of the same shape, passed
    as a tuple, the outermost dimension (size 2) runs over them, the lower in memory first; its stride is their
    distance, filled in here.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    offset: int = 0


def _descriptor(tile: Tile, tensor: Tensor | tuple[Tensor, Tensor], gluon: bool = False) -> Any:
    if isinstance(tensor, tuple):
        lower, upper = sorted(tensor, key=lambda t: t.data_ptr())
        distance = (upper.data_ptr() - lower.data_ptr()) // lower.element_size()
        return TensorDescriptor(lower, list(tile.shape), [distance, *tile.strides[1:]], list(tile.block))
    if tile.offset:
        tensor = tensor.as_strided((1,), (1,), tensor.storage_offset() + tile.offset)
    if gluon:
        return _gluon_descriptor(tile, tensor)
    return TensorDescriptor(tensor, list(tile.shape), list(tile.strides), list(tile.block))


def _gluon_descriptor(tile: Tile, tensor: Tensor) -> Any:
    """A Gluon kernel's descriptor says how its box lies in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(tensor, list(tile.shape), list(tile.strides), list(tile.block), gluon_layout(tile, tensor))


def gluon_layout(tile: Tile, tensor: Tensor) -> Any:
    """The layout of a tile in shared memory that suits wgmma: the widest swizzle that its rows allow."""
    from triton.experimental.gluon import language as gl

    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[tensor.dtype]
    return gl.NVMMASharedLayout.get_default_for(list(tile.block), dtype)


def is_gluon(kernel: Any) -> bool:
    """Whether a kernel is written in Gluon."""
    return bool(getattr(kernel, "is_gluon", lambda: False)())


class Launch:
    """One kernel with its grid, compile-time constants and options; callable with the run-time arguments.

    ``tiles`` maps the positions of TMA arguments to how they are seen; the tensors themselves are passed at each call.
    The run-time arguments must be of the same kind at each call (dtypes, alignment, divisibility by 16, the shapes
    in ``tiles``): whoever keeps a Launch keys it by them.

    ``numbers``: the sizes and strides among the arguments, where whoever keeps a Launch passes these at each call.
    """

    __slots__ = (
        "_args",
        "_calls",
        "_compiled",
        "_launcher",
        "_maps",
        "_numbers",
        "_pairs",
        "_plan",
        "_raw",
        "_tensors",
        "constants",
        "grid",
        "kernel",
        "numbers",
        "options",
        "spec",
        "tiles",
    )

    def __init__(
        self,
        kernel: Any,
        grid: int,
        constants: tuple[Any, ...],
        tiles: dict[int, Tile] | None = None,
        **options: Any,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self.options = options
        self.tiles = tiles or {}
        self.numbers: tuple[int, ...] = ()
        self._compiled: Any = None  # kept: Triton unloads a kernel that nobody holds
        self._plan: Any = None  # launch() of a plan of the compiled launcher
        self.spec: Any = None  # the kernel as that plan has it
        self._launcher: Any = None  # the compiled kernel's run, or the C function under it
        self._raw = False
        self._args: tuple[Any, ...] = ()  # what comes before the kernel's own arguments, less grid and stream
        self._maps: list[tuple[int, Tile, Any, dict[Any, list[Any]]]] = []  # position, tile, its meta, encoded maps
        self._calls: dict[tuple[int, ...], tuple[Any, ...]] = {}  # all that follows the stream, by addresses, numbers
        self._tensors: tuple[int, ...] = ()  # positions of tensors, of pairs of them, of numbers
        self._pairs: tuple[int, ...] = ()
        self._numbers: tuple[int, ...] = ()

    def __call__(self, device_index: int | None, *args: Any) -> None:
        """Launch on the device's current stream."""
        written = record.current()
        if written is not None:
            written.launched(self, args)
        hooked = _hooked()
        if self._plan is not None and not hooked:
            # Its device need not be the current one: the plan knows its own.
            self._plan(_C._cuda_getCurrentRawStream(device_index), *args)  # type: ignore[arg-type]
            return
        if device_index is not None and torch._C._cuda_getDevice() != device_index:
            with torch.cuda.device(device_index):
                return self(device_index, *args)
        if self._launcher is None or hooked:
            if self._launcher is not None or self._plan is not None or device_index is None:
                self._by_triton(args)
            elif torch.cuda.is_current_stream_capturing():
                self._first_in_capture(device_index, args)
            else:
                self._first(device_index, args)
            return
        stream = _C._cuda_getCurrentRawStream(device_index)  # type: ignore[arg-type]
        if not self._raw:
            self._launcher(self.grid, 1, 1, stream, *self._args, *self._public(args), *self.constants)
            return
        key = tuple([args[i].data_ptr() for i in self._tensors])
        for i in self._pairs:
            key += (args[i][0].data_ptr(), args[i][1].data_ptr())
        if self._numbers:
            key += tuple([args[i] for i in self._numbers])
        call = self._calls.get(key)
        if call is None:
            call = self._flatten(key, args)
        self._launcher(self.grid, 1, 1, stream, *call)

    def of(self, *numbers: int) -> Launch:
        """The launch, which is passed these numbers at every call."""
        self.numbers = numbers
        return self

    def compile(self, device_index: int | None, *args: Any) -> None:
        """Compile, and launch nothing: what a call with these arguments needs is then in Triton's cache on disk."""
        compiled = self.kernel.warmup(*self._public(args), *self.constants, grid=(self.grid,), **self.options)
        _ = compiled.run  # Triton's launcher of this signature is compiled when it is first asked for

    def _by_triton(self, args: tuple[Any, ...]) -> Any:
        return self.kernel[(self.grid,)](*self._public(args), *self.constants, **self.options)

    def _first(self, device_index: int, args: tuple[Any, ...]) -> None:
        compiled = self._by_triton(args)
        if compiled is not None and _VERSION in _RUN:
            self._adopt(compiled, device_index, args)

    def _first_in_capture(self, device_index: int, args: tuple[Any, ...]) -> None:
        """A first launch compiles and loads a module, which a capture forbids its thread unless it is relaxed."""
        try:
            with _relaxed_capture():
                self._first(device_index, args)
        except Exception as error:
            raise RuntimeError(
                f"the kernel {getattr(self.kernel, '__name__', self.kernel)} is launched for the first time inside a "
                f"CUDA graph capture, where it could not be loaded: {error}. Call "
                f"fusedmlp.warmup(module, token_counts) before the capture"
            ) from error

    def _flatten(self, call_key: tuple[int, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The C function's arguments after the stream: addresses for tensors, encoded maps for tiles."""
        flat = list(args)
        for i in self._tensors:
            if i not in self.tiles:
                flat[i] = flat[i].data_ptr()
        for i, tile, meta, maps in self._maps:
            tensor = flat[i]
            key = (tensor[0].data_ptr(), tensor[1].data_ptr()) if type(tensor) is tuple else tensor.data_ptr()
            encoded = maps.get(key)
            if encoded is None:
                encoded = list(_make_tensordesc_arg(_descriptor(tile, tensor), meta))
                if len(maps) >= MAX_MAPS:
                    maps.clear()
                maps[key] = encoded
            flat[i : i + 1] = encoded
        if len(self._calls) >= MAX_MAPS:
            self._calls.clear()
        call = self._calls[call_key] = (*self._args, *flat, *self.constants)
        return call

    def _public(self, args: tuple[Any, ...]) -> list[Any]:
        gluon = is_gluon(self.kernel)
        return [_descriptor(self.tiles[i], a, gluon) if i in self.tiles else a for i, a in enumerate(args)]

    def _adopt(self, compiled: Any, device_index: int, args: tuple[Any, ...]) -> None:
        """Take the fastest path that this compiled kernel offers."""
        self._compiled = compiled
        if _launcher is not None:
            pairs = {i for i, a in enumerate(args) if isinstance(a, tuple)}
            spec = _kernel_spec(compiled, self.grid, len(args), self.tiles, pairs)
            if spec is not None:
                self.spec = spec
                self._plan = _launcher.Plan(device_index, len(args), (spec,)).launch
                return
        self._tensors = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor))
        self._pairs = tuple(i for i, a in enumerate(args) if isinstance(a, tuple))
        self._numbers = () if self.numbers else tuple(i for i, a in enumerate(args) if isinstance(a, int))
        function = _c_function(compiled)
        if function is None:
            self._args = (compiled.function, compiled.packed_metadata, None, None, None)
            self._launcher = compiled.run
            return
        self._raw = True
        cooperative, dependent = compiled.run.launch_cooperative_grid, compiled.run.launch_pdl
        self._args = (compiled.function, cooperative, dependent, None, None, compiled.packed_metadata, None, None, None)
        metas = getattr(compiled.metadata, "tensordesc_meta", None) or []
        maps: list[tuple[int, Tile, Any, dict[Any, list[Any]]]] = []
        for n, (i, tile) in enumerate(sorted(self.tiles.items())):
            maps.append((i, tile, metas[n] if metas else None, {}))
        # Last position first: putting a map's values in place must not move the positions still to come.
        self._maps = maps[::-1]
        self._launcher = function


def _make_tensordesc_arg(descriptor: TensorDescriptor, meta: Any) -> Any:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, meta)


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """This thread may load modules although a graph is captured. From CUDA 12.3 on the driver can do so."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    try:
        exchange: Any = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # the driver has another name here: let it say what it thinks of the load
        exchange = lambda mode: None  # noqa: E731
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def known_triton() -> bool:
    """Whether compiled kernels of this Triton can be launched without it."""
    return _VERSION in _RUN


def path() -> str:
    """How steady launches go on this machine, in words."""
    if interpreting():
        return "Triton's interpreter"
    if _VERSION not in _RUN:
        return f"kernel[grid], since Triton {triton.__version__} is not known"
    if _launcher is not None:
        return "the compiled launcher"
    why = "switched off by FUSEDMLP_LAUNCHER" if os.environ.get("FUSEDMLP_LAUNCHER") == "triton" else "not built"
    return f"Triton's own launcher; the compiled one is {why}"


def _kernel_spec(
    compiled: Any, grid: int, arguments: int, tiles: dict[int, Tile], pairs: set[int]
) -> tuple[Any, ...] | None:
    """The kernel as the compiled launcher takes it; None where anything about it is not as expected here.

    Triton passes a tensor descriptor as a tensor map, its sizes (int32) and strides (int64), leaves out constants
    and what it specialised on (None, 1), and ends with two addresses of scratch memory. What the kernel's PTX
    declares must come to the same.
    """
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    metas = list(getattr(metadata, "tensordesc_meta", None) or [])
    specs: list[tuple[Any, ...]] = []
    sizes: list[int] = []
    for i, kind in enumerate(list(compiled.src.signature.values())[:arguments]):
        if kind == "constexpr":
            continue
        if i in tiles:
            if not metas or metas[0].get("fp4_padded") or metas[0].get("is_im2col"):
                return None
            specs.append(_map_spec(i, tiles[i], i in pairs, metas.pop(0)))
            rank = len(tiles[i].shape)
            sizes += [128, *[4] * rank, *[8] * rank]
        elif str(kind).startswith("*"):
            specs.append(("address", i))
            sizes.append(8)
        elif kind in _BYTES:
            specs.append(("int32" if _BYTES[kind] == 4 else "int64", i))
            sizes.append(_BYTES[kind])
        else:
            return None
    specs += [("constant64", 0), ("constant64", 0)]
    if sizes + [8, 8] != _parameter_sizes(compiled):
        return None
    return (
        compiled.name,
        compiled.function,
        (grid, 1, 1),
        32 * metadata.num_warps,
        metadata.shared,
        bool(metadata.launch_cooperative_grid),
        bool(metadata.launch_pdl),
        tuple(specs),
    )


def _map_spec(position: int, tile: Tile, pair: bool, meta: Any) -> tuple[Any, ...]:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["elem_size"], meta["swizzle"], 0  # zeros beyond the edge
    # The box is the compiled kernel's: of a wide tile it may be a part, which the kernel loads piece by piece.
    return ("map", position, pair, tile.offset, *kind, tile.shape, tile.strides, tuple(meta["block_size"]))


def _parameter_sizes(compiled: Any) -> list[int]:
    """Bytes of each parameter that the kernel's PTX declares; none where there is no PTX."""
    ptx = compiled.asm.get("ptx", "")
    head = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\b[^,\[]*(?:\[(\d+)\])?", head[1] if head else "")
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def _c_function(compiled: Any) -> Any:
    """The C function that launches, where this Triton has one that takes flat arguments and no scratch memory."""
    if _VERSION not in _RAW:
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    closure = getattr(launcher.launch, "__closure__", None) or ()
    for found in (launcher.launch, *[cell.cell_contents for cell in closure]):
        if type(found).__name__ == "builtin_function_or_method" and found.__name__ == "launch":
            return found
    return None


def _hooked() -> bool:
    """A profiler such as Proton hooks launches: let Triton launch then, so that it sees them."""
    hook = _runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
