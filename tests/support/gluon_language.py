"""Gluon's functions over the simulated machine: values in registers, shared memory, TMA, tensor cores, pointers.

Work is done as late as it may be: a TMA load lands some steps after its issue; a `warpgroup_mma` reads its operands,
and a TMA store its buffer, only when a wait forces it.

What a kernel needs beyond this is added to LANGUAGE, HOPPER or ASSEMBLY.
"""

from __future__ import annotations

import linecache
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .gluon_machine import Access, Allocation, Barrier, Partition, expect, here, step


@dataclass(frozen=True)
class DType:
    name: str
    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize

    def is_floating(self) -> bool:
        return self.torch.is_floating_point

    def is_int(self) -> bool:
        return not self.torch.is_floating_point

    def __str__(self) -> str:
        return self.name


DTYPES = {
    name: DType(name, getattr(torch, stands_for))
    for name, stands_for in {
        "int1": "bool",
        "float8e4nv": "float8_e4m3fn",
        "float8e5": "float8_e5m2",
        **{same: same for same in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64")},
        **{same: same for same in ("uint8", "uint16", "uint32", "uint64")},
    }.items()
}
_OF_TORCH = {dtype.torch: dtype for dtype in DTYPES.values()}


def _torch(dtype: DType | torch.dtype) -> torch.dtype:
    return dtype.torch if isinstance(dtype, DType) else dtype


def _poison(dtype: torch.dtype) -> float | int | bool:
    """What memory holds before anybody wrote to it."""
    if dtype.is_floating_point:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).min


class Layout:
    """Any layout: it is carried along and never looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.__dict__.update(kwargs)

    @classmethod
    def get_default_for(cls, *args: Any, **kwargs: Any) -> Layout:
        return cls(*args, **kwargs)


class MBarrierLayout(Layout):
    pass


LAYOUTS = (
    *("AutoLayout", "BlockedLayout", "CoalescedLayout", "DistributedLinearLayout", "DotOperandLayout"),
    *("NVMMADistributedLayout", "NVMMASharedLayout", "SharedLinearLayout", "SliceLayout", "SwizzledSharedLayout"),
)


class Value:
    """A tensor in registers, or the accumulator of a `warpgroup_mma` that is still in flight."""

    __hash__ = None

    def __init__(self, data: Tensor | None, layout: Layout | None = None, mma: _Mma | None = None) -> None:
        self._data, self._layout, self._mma = data, layout, mma

    @property
    def data(self) -> Tensor:
        expect(self._mma is None, "a value was used while its warpgroup_mma is in flight: no wait returned it complete")
        assert self._data is not None
        return self._data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape if self._mma is None else self._mma.shape)

    @property
    def dtype(self) -> DType:
        return _OF_TORCH[self.data.dtype if self._mma is None else self._mma.dtype]

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self._layout, shape=self.shape, element_ty=self.dtype, scalar=self.dtype)

    def to(self, dtype: DType | torch.dtype, bitcast: bool = False) -> Value:
        data = self.data.view(_torch(dtype)) if bitcast else self.data.to(_torch(dtype))
        return Value(data, self._layout)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index], self._layout)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.data)


def _raw(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


def _layout_of(values: Iterable[Any]) -> Layout | None:
    layouts = (value._layout for value in values if isinstance(value, Value))
    return next((layout for layout in layouts if layout is not None), None)


def _lift(function: Callable[..., Tensor]) -> Callable[..., Value]:
    """A function of torch tensors as one of values and scalars."""

    def lifted(*args: Any) -> Value:
        raw = [_raw(arg) for arg in args]
        if not any(isinstance(arg, Tensor) for arg in raw):
            raw = [torch.as_tensor(arg) for arg in raw]
        return Value(function(*raw), _layout_of(args))

    return lifted


def _binary(function: Callable[[Any, Any], Any], swap: bool = False) -> Callable[[Value, Any], Any]:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        mine, theirs = self.data, _raw(other)
        return Value(function(theirs, mine) if swap else function(mine, theirs), _layout_of((self, other)))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Value, f"__{_name}__", _binary(_function))
    setattr(Value, f"__r{_name}__", _binary(_function, swap=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "invert", "abs"):
    setattr(Value, f"__{_name}__", _lift(getattr(operator, _name)))


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, name: str, allocation: Allocation, data: Tensor, layout: Layout | None) -> None:
        self.name, self.allocation, self.data, self.layout = name, allocation, data, layout

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.ndim

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def dtype(self) -> DType:
        return _OF_TORCH[self.data.dtype]

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype)

    def _view(self, data: Tensor, where: str = "") -> Shared:
        return Shared(self.name + where, self.allocation, data, self.layout)

    def index(self, index: Any) -> Shared:
        index = _within(index, self.shape[0], self.name)
        return self._view(self.data[index], f"[{index}]")

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        start = int(start)
        where = f"[{':, ' * dim}{start}:{start + length}]"
        expect(0 <= start <= self.shape[dim] - length, f"{self.name}{where} of {self.shape}")
        return self._view(self.data.narrow(dim, start, length), where)

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(self.data.view(*shape))

    def _reinterpret(self, dtype: DType | torch.dtype, shape: Sequence[int], layout: Layout | None) -> Shared:
        """The same bytes in another shape. How they lie there is not modelled: what was stored must be read alike."""
        expect(_torch(dtype) is self.data.dtype, f"{self.name} of {self.dtype} as {dtype} is not modelled")
        expect(math.prod(shape) == self.numel, f"{self.name} is {self.shape}, and not {list(shape)}")
        return Shared(self.name, self.allocation, self.data.view(*shape), layout)

    def access(self, what: str, by: Partition, write: bool, generic: bool, **options: Any) -> Access:
        region = tuple(self.data.shape), self.data.stride(), int(self.data.storage_offset())
        access = Access(what, self.name, region, write, generic, **{"actor": by, "epoch": by.epoch, **options})
        self.allocation.add(access, by)
        return access

    def load(self, layout: Layout | None = None) -> Value:
        self.access("load", step(), write=False, generic=True)
        return Value(self.data.clone(), layout)

    def store(self, value: Value) -> None:
        expect(value.shape == self.shape, f"store of {value.shape} to {self.name}, which is {self.shape}")
        expect(value.dtype == self.dtype, f"store of {value.dtype} to {self.name}, which is {self.dtype}")
        self.access("store", step(), write=True, generic=True)
        self.data.copy_(value.data)

    def _keep_alive(self) -> None:
        pass


class BarrierArray:
    def __init__(self, barriers: Sequence[Barrier], shape: Sequence[int]) -> None:
        self.barriers, self.shape, self.dtype = barriers, list(shape), DTYPES["int64"]

    def index(self, index: Any) -> BarrierArray:
        number = _within(index, len(self.barriers), self.barriers[0].name)
        return BarrierArray([self.barriers[number]], [1])


def _within(index: Any, size: int, name: str) -> int:
    index = int(index)
    expect(0 <= index < size, f"index {index} of {name}, which has {size}")
    return index


def _barrier(array: BarrierArray) -> Barrier:
    expect(len(array.barriers) == 1, f"a barrier is needed, not {len(array.barriers)} of them")
    barrier = array.barriers[0]
    barrier.check()
    return barrier


def _assigned_name(depth: int) -> str:
    """The variable that a call's result goes to, for messages."""
    frame = sys._getframe(depth)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    match = re.match(r"\s*(\w+)\s*(:[^=]+)?=(?!=)", line)
    return match[1] if match else "shared memory"


class Descriptor:
    """A TMA descriptor of a tensor on the CPU: blocks are cut off, and filled with zeros, at its edges."""

    def __init__(self, tensor: Tensor, block: Sequence[int], layout: Layout | None = None) -> None:
        expect(tensor.ndim == len(block), f"a block of {len(block)} dimensions for a tensor of {tensor.ndim}")
        expect(tensor.shape[-1] < 2 or tensor.stride(-1) == 1, "TMA needs a last dimension without gaps")
        self.tensor, self.layout, self.dtype = tensor, layout or Layout(), _OF_TORCH[tensor.dtype]
        self.shape, self.block_shape = list(tensor.shape), list(block)
        nbytes = math.prod(block) * tensor.element_size()
        self.block_type = SimpleNamespace(shape=self.block_shape, nbytes=nbytes, element_ty=self.dtype)

    def inside(self, corner: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the block at ``corner`` that lies in the tensor, and where in the block it lies."""
        starts = [min(start, size) for start, size in zip(corner, self.shape)]
        ends = [min(start + block, size) for start, block, size in zip(starts, self.block_shape, self.shape)]
        box = tuple(slice(start, end) for start, end in zip(starts, ends))
        return self.tensor[box], tuple(slice(0, end - start) for start, end in zip(starts, ends))

    def check(self, corner: Sequence[Any], shared: Shared) -> list[int]:
        """The corner as integers. Shapes and dtypes must fit, as nothing converts them."""
        starts = [int(start) for start in corner]
        expect(len(starts) == len(self.shape), f"{len(starts)} coordinates for {len(self.shape)} dimensions")
        expect(all(start >= 0 for start in starts), f"TMA at {starts}: negative starts are not modelled")
        name = shared.name
        expect(shared.shape == self.block_shape, f"TMA of a block {self.block_shape} and {name} {shared.shape}")
        expect(shared.dtype == self.dtype, f"TMA of {self.dtype} and {name} of {shared.dtype}")
        return starts


def _tma_load(desc: Descriptor, coord: Sequence[Any], barrier: BarrierArray, result: Shared, pred: Any = True) -> None:
    me = step()
    if not pred:
        return
    signalled, corner = _barrier(barrier), desc.check(coord, result)
    access = result.access("TMA load", me, write=True, generic=False, actor=signalled, pending=True)
    clock, fenced = dict(me.clock), dict(me.fenced)
    me.clock[me] += 1

    def land() -> None:
        source, box = desc.inside(corner)
        result.data.zero_()
        result.data[box] = source
        # Whoever sees the phase complete to which these bytes belong may read them.
        result.allocation.settle(access, signalled.phase + 1)
        signalled.update(clock, fenced, nbytes=-desc.block_type.nbytes)

    me.machine.later(land)


@dataclass
class _Store:
    desc: Descriptor
    corner: list[int]
    source: Shared
    access: Access

    def finish(self, by: Partition) -> None:
        target, box = self.desc.inside(self.corner)
        target.copy_(self.source.data[box])
        self.source.allocation.settle(self.access, by.epoch)


def _tma_store(desc: Descriptor, coord: Sequence[Any], src: Shared) -> None:
    me = step()
    corner = desc.check(coord, src)
    access = src.access("TMA store", me, write=False, generic=False, pending=True)
    me.stores.append(_Store(desc, corner, src, access))


def _store_wait(pendings: int) -> None:
    step().drain_stores(pendings)


class _Mma:
    """One product in flight. Products of a partition finish in the order of their issue, whatever they add to."""

    def __init__(self, a: Value | Shared, b: Shared, acc: Value, use_acc: bool, by: Partition) -> None:
        expect(a.shape[1] == b.shape[0], f"warpgroup_mma of {a.shape} and {b.shape}")
        self.shape = [a.shape[0], b.shape[1]]
        expect(acc.shape == self.shape, f"warpgroup_mma of {a.shape} and {b.shape} into {acc.shape}")
        self.dtype = acc.dtype.torch
        self.a, self.b, self.acc, self.use_acc = a.data, b.data, acc, use_acc
        shared = [operand for operand in (a, b) if isinstance(operand, Shared)]
        self.accesses = [
            (operand.allocation, operand.access("warpgroup_mma", by, write=False, generic=False, pending=True))
            for operand in shared
        ]
        self.result: Tensor | None = None

    def finish(self, by: Partition) -> None:
        total = (self.a.float() @ self.b.float()).to(self.dtype)
        if self.use_acc:
            before = self.acc._data if self.acc._mma is None else self.acc._mma.result
            assert before is not None
            total += before
        self.result = total
        del self.a, self.b, self.acc
        for allocation, access in self.accesses:
            allocation.settle(access, by.epoch)


def _mma(
    a: Value | Shared,
    b: Shared,
    acc: Value,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: bool = False,
) -> Value:
    me = step()
    me.mmas.append(_Mma(a, b, acc, bool(use_acc), me))
    pending = Value(None, acc._layout, me.mmas[-1])
    return pending if is_async else _mma_wait(0, (pending,))


def _mma_wait(num_outstanding: int = 0, deps: Sequence[Value] | None = None) -> Any:
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    step().drain_mmas(num_outstanding)

    def now(value: Value) -> Value:
        # Only what a wait returns complete may be used: a later wait that does not name it orders nothing.
        mma = value._mma
        return value if mma is None or mma.result is None else Value(mma.result, value._layout)

    results = tuple(now(value) for value in deps)
    return results[0] if len(results) == 1 else results


def _init(mbarrier: BarrierArray, count: int) -> None:
    step()
    expect(len(mbarrier.barriers) == 1, "mbarrier.init of more than one barrier")
    mbarrier.barriers[0].init(count)


def _invalidate(mbarrier: BarrierArray) -> None:
    step()
    _barrier(mbarrier).count = None


def _wait(mbarrier: BarrierArray, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    if pred:
        parity = int(phase)
        expect(parity in (0, 1), f"{_barrier(mbarrier).name} waits for phase {parity}: it takes a parity, 0 or 1")
        here().wait(_barrier(mbarrier), parity)


def _expect_bytes(mbarrier: BarrierArray, bytes: int, pred: Any = True) -> None:
    me = step()
    if pred:
        me.arrive(_barrier(mbarrier), 1, int(bytes))


def _arrive(mbarrier: BarrierArray, *, count: int = 1, pred: Any = True) -> None:
    me = step()
    if pred:
        me.arrive(_barrier(mbarrier), count)


def _fence(cluster: bool = False) -> None:
    step().fence()


HOPPER: dict[str, Any] = {
    "fence_async_shared": _fence,
    "mbarrier": {
        "MBarrierLayout": MBarrierLayout,
        "init": _init,
        "invalidate": _invalidate,
        "wait": _wait,
        "expect": _expect_bytes,
        "arrive": _arrive,
    },
    "tma": {
        # Both names that Triton has had for them.
        "async_load": _tma_load,
        "async_copy_global_to_shared": _tma_load,
        "async_store": _tma_store,
        "async_copy_shared_to_global": _tma_store,
        "store_wait": _store_wait,
    },
    "warpgroup_mma": _mma,
    "warpgroup_mma_wait": _mma_wait,
}


class Pointer:
    """A pointer to a tensor's elements, or as many as its offsets are. Accesses outside of the storage are errors."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        start = int(tensor.storage_offset())
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - start
        self.tensor, self.offset = tensor, offset
        self.memory = tensor.detach().as_strided((size,), (1,), start)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=_OF_TORCH[self.tensor.dtype])

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=_OF_TORCH[self.tensor.dtype], layout=_layout_of([self.offset]))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset - offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        offsets, mask = torch.broadcast_tensors(
            torch.as_tensor(_raw(self.offset)).long(), torch.as_tensor(True if mask is None else _raw(mask)).bool()
        )
        inside = (offsets >= 0) & (offsets < self.memory.numel())
        expect((inside | ~mask).all(), "an access through a pointer lies outside of its tensor's storage")
        return torch.where(mask, offsets, 0), mask


def passed(value: Any) -> Any:
    """An argument as a kernel gets it."""
    if isinstance(value, Tensor):
        return Pointer(value)
    return _OF_TORCH[value] if isinstance(value, torch.dtype) else value


def _masked(value: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(_raw(value)).to(dtype).expand(mask.shape)[mask]


# By opcode; exact where the instruction is approximate.
ASSEMBLY: dict[str, Callable[..., Tensor]] = {
    "tanh.approx.f32": torch.tanh,
    "ex2.approx.ftz.f32": torch.exp2,
    "ex2.approx.f32": torch.exp2,
    "lg2.approx.f32": torch.log2,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "cvt.rna.tf32.f32": torch.clone,
}
LANGUAGE: dict[str, Any] = {}


def _language(function: Any) -> Any:
    LANGUAGE[function.__name__.rstrip("_")] = function
    return function


@_language
class constexpr:
    """An annotation; as a function it leaves its argument as it is."""

    def __new__(cls, value: Any) -> Any:
        return value


@_language
def program_id(axis: int) -> int:
    return here().machine.program[axis]


@_language
def num_programs(axis: int) -> int:
    return here().machine.grid[axis]


@_language
def num_warps() -> int:
    return here().num_warps


@_language
def num_ctas() -> int:
    return 1


@_language
def thread_barrier() -> None:
    step()


LANGUAGE["debug_barrier"] = thread_barrier  # as Triton calls it


@_language
def static_assert(condition: Any, message: str = "") -> None:
    expect(condition, f"static_assert: {message}")


@_language
def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


@_language
def allocate_shared_memory(
    element_ty: DType | torch.dtype, shape: Sequence[int], layout: Layout | None, value: Value | None = None
) -> Shared | BarrierArray:
    name, dtype = _assigned_name(2), _torch(element_ty)
    if isinstance(layout, MBarrierLayout):
        expect(dtype is torch.int64 and math.prod(shape) == shape[0], "barriers are int64, [n] or [n, 1]")
        barriers = [Barrier(f"{name}[{i}]") for i in range(shape[0])]
        here().machine.barriers.extend(barriers)
        return BarrierArray(barriers, shape)
    shared = Shared(name, Allocation(), torch.full(tuple(shape), _poison(dtype), dtype=dtype), layout)
    if value is not None:
        shared.store(value)
    return shared


@_language
def warp_specialize(
    functions_and_args: Sequence[tuple[Callable[..., Any], Sequence[Any]]],
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int],
) -> Any:
    """The first function is the default partition: it has the launch's warps, and its result is returned."""
    workers = len(functions_and_args) - 1
    expect(len(worker_num_warps) == workers, f"{workers} workers, but {len(worker_num_warps)} numbers of warps")
    expect(len(worker_num_regs) == workers, f"{workers} workers, but {len(worker_num_regs)} numbers of registers")
    me = here()
    children = []
    for i, ((function, args), warps) in enumerate(zip(functions_and_args, [me.num_warps, *worker_num_warps])):
        expect(isinstance(args, tuple), f"arguments of {function.__name__} must be a tuple")
        children.append(Partition(me.machine, f"{function.__name__}/{i}", warps, parent=me))
        me.machine.start(children[-1], function, args, {})
    me.wait_for(children)
    return children[0].result


@_language
def load_(pointer: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    step()
    places, mask = pointer.places(mask)
    dtype = pointer.tensor.dtype
    hidden = _poison(dtype) if other is None else _raw(other)
    data = torch.where(mask, pointer.memory[places], torch.as_tensor(hidden).to(dtype))
    return Value(data, _layout_of([pointer.offset]))


@_language
def store(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    step()
    places, mask = pointer.places(mask)
    pointer.memory[places[mask]] = _masked(value, mask, pointer.tensor.dtype)


@_language
def atomic_add(pointer: Pointer, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Value:
    step()
    places, mask = pointer.places(mask)
    before = pointer.memory[places].clone()
    added = _masked(val, mask, pointer.tensor.dtype)
    pointer.memory.index_put_((places[mask],), added, accumulate=True)
    return Value(before, _layout_of([pointer.offset]))


@_language
def atomic_xchg(pointer: Pointer, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Value:
    step()
    places, mask = pointer.places(mask)
    before = pointer.memory[places].clone()
    pointer.memory[places[mask]] = _masked(val, mask, pointer.tensor.dtype)
    return Value(before, _layout_of([pointer.offset]))


@_language
def full(shape: Sequence[int], value: Any, dtype: DType | torch.dtype, layout: Layout | None = None) -> Value:
    return Value(torch.full(tuple(shape), _raw(value), dtype=_torch(dtype)), layout)


@_language
def zeros(shape: Sequence[int], dtype: DType | torch.dtype, layout: Layout | None = None) -> Value:
    return full(shape, 0, dtype, layout)


@_language
def full_like(input: Value, value: Any) -> Value:
    return full(input.shape, value, input.dtype, input._layout)


@_language
def zeros_like(input: Value) -> Value:
    return full_like(input, 0)


@_language
def arange(start: int, end: int, layout: Layout | None = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32), layout)


@_language
def where(condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, Value):
        return x if condition else y
    return _lift(torch.where)(condition, x, y)


def _extremum(of_numbers: Any, of_floats: Any, of_integers: Any) -> Callable[..., Any]:
    def extremum(x: Any, y: Any, **options: Any) -> Any:
        if not isinstance(x, Value) and not isinstance(y, Value):
            return of_numbers(x, y)
        dtype = (x if isinstance(x, Value) else y).data.dtype
        one, other = (arg.data if isinstance(arg, Value) else torch.as_tensor(arg, dtype=dtype) for arg in (x, y))
        # As Triton's default: of a number and NaN, the number.
        function = of_floats if one.is_floating_point() else of_integers
        return Value(function(one, other), _layout_of((x, y)))

    return extremum


@_language
def expand_dims(x: Value, axis: int) -> Value:
    return Value(x.data.unsqueeze(axis), x._layout)


@_language
def reshape(x: Value, *shape: Any) -> Value:
    return Value(x.data.reshape(*shape), x._layout)


@_language
def permute(x: Value, *dims: Any) -> Value:
    return Value(x.data.permute(*dims), x._layout)


@_language
def split(x: Value) -> tuple[Value, Value]:
    expect(x.shape[-1] == 2, f"split of {x.shape}: the last dimension must be 2")
    one, other = x.data.unbind(-1)
    return Value(one, x._layout), Value(other, x._layout)


@_language
def join(x: Value, y: Value) -> Value:
    return Value(torch.stack(torch.broadcast_tensors(x.data, y.data), -1), x._layout)


@_language
def convert_layout(value: Value, layout: Layout, assert_trivial: bool = False) -> Value:
    return Value(value.data, layout)


@_language
def set_auto_layout(value: Value, layout: Layout) -> Value:
    return Value(value.data, layout)


@_language
def cast(input: Value, dtype: DType | torch.dtype, bitcast: bool = False) -> Value:
    return input.to(dtype, bitcast)


@_language
def sum_(input: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    data = input.data
    axes = tuple(range(data.ndim)) if axis is None else axis
    return Value(data.sum(axes, keepdim=keep_dims, dtype=data.dtype), input._layout)


@_language
def max_(input: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    axes = tuple(range(input.data.ndim)) if axis is None else axis
    return Value(input.data.amax(axes, keepdim=keep_dims), input._layout)


@_language
def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: DType | torch.dtype, is_pure: bool, pack: int
) -> Value:
    opcode = asm.split()[0]
    if opcode not in ASSEMBLY:
        raise NotImplementedError(
            f"the simulator does not know {opcode}: it may be added to ASSEMBLY in gluon_language.py"
        )
    return _lift(ASSEMBLY[opcode])(*args).to(dtype)


def same(value: Any, *hints: Any, **options: Any) -> Any:
    return value


LANGUAGE.update(
    DTYPES,
    **{name: type(name, (Layout,), {}) for name in LAYOUTS},
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy", "to_tensor"), same),
    **{name: _lift(getattr(torch, name)) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "abs")},
    **{name: _lift(getattr(torch, name)) for name in ("floor", "ceil", "sin", "cos")},
    fma=_lift(lambda x, y, z: x * y + z),
    fdiv=_lift(operator.truediv),
    div_rn=_lift(operator.truediv),
    sqrt_rn=_lift(torch.sqrt),
    minimum=_extremum(min, torch.fmin, torch.minimum),
    maximum=_extremum(max, torch.fmax, torch.maximum),
    static_range=range,
    tuple=tuple,
    static_print=lambda *args: None,
    assume=lambda condition: None,
)
for _name in ("expand_dims", "reshape", "permute", "split"):  # that are methods as well
    setattr(Value, _name, LANGUAGE[_name])
