"""Writes an operation down while it runs: allocations, PyTorch operations and launches, as steps on numbered values.

What depends on anything but the layout of its inputs cannot be written down, and the record says so (``why``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}


@dataclass(frozen=True)
class Ref:
    """In the place of a tensor among the arguments of a step: its value."""

    value: int


class Step:
    """What happened, in its turn."""


@dataclass
class Allocation(Step):
    value: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Operation(Step):
    """An operation of PyTorch; ``writes``: it changes an argument."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    writes: bool


@dataclass
class Launched(Step):
    launch: Any
    args: tuple[Any, ...]


@dataclass
class Value:
    """A tensor; it lies ``offset`` bytes behind the address of the value ``owner``, whose memory it shares."""

    tensor: Tensor | None
    owner: int
    offset: int = 0


class Record(TorchDispatchMode):
    """Everything that runs inside, in this thread.

    Attributes:
        values: inputs first, as they were given.
        steps: in order.
        constants: tensors that are there for good, by their values.
        bound: something in it is the current stream's alone.
        why: why this is no record of all that happened; None where it is.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.steps: list[Step] = []
        self.constants: dict[int, Tensor] = {}
        self.bound = False
        self.why: str | None = None
        self._index: dict[int, int] = {}
        for t in inputs:
            self._add(t, len(self.values))
        if len(self._index) < sum(t is not None for t in inputs):
            self.why = "one tensor is passed twice"  # which of the two a step means, only this call knows

    def __enter__(self) -> Record:
        _records[get_ident()] = self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        del _records[get_ident()]
        super().__exit__(*error)

    def _add(self, t: Tensor | None, owner: int, offset: int = 0) -> int:
        index = len(self.values)
        self.values.append(Value(t, owner, offset))
        if t is not None:
            self._index[id(t)] = index
        return index

    def value_of(self, t: Tensor) -> int:
        """The number of a tensor that was seen; -1, and a reason, for another."""
        found = self._index.get(id(t), -1)
        if found < 0:
            self.why = self.why or "it uses a tensor that is not of this call"
        return found

    def replaced(self, argument: Any) -> Any:
        """An argument with a :class:`Ref` for each tensor."""
        if isinstance(argument, Tensor):
            return Ref(self.value_of(argument))
        if isinstance(argument, (tuple, list)):
            return type(argument)(self.replaced(a) for a in argument)
        return argument

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.why is None:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        results = (out,) if isinstance(out, Tensor) else out
        if not isinstance(results, (tuple, list)) or not all(isinstance(t, Tensor) for t in results):
            self.why = f"{func} returns more than tensors"
            return
        if func in _ALLOCATIONS and out.is_contiguous() and out.device == self._device():
            self.steps.append(Allocation(self._own(out), tuple(out.shape), out.stride(), out.dtype))
            return
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        given = tuple(self.replaced(a) for a in args), {k: self.replaced(v) for k, v in kwargs.items()}
        if self.why is None:
            made = tuple(self._result(t, operands) for t in results)
            self.steps.append(Operation(func, *given, made, func._schema.is_mutable))

    def _device(self) -> torch.device:
        return next(v.tensor.device for v in self.values if v.tensor is not None)

    def _own(self, t: Tensor) -> int:
        return self._add(t, len(self.values))

    def _result(self, t: Tensor, operands: Sequence[Tensor]) -> int:
        if id(t) in self._index:
            return self._index[id(t)]
        storage = t.untyped_storage().data_ptr()
        for source in operands:
            if source.untyped_storage().data_ptr() == storage:
                owner = self.values[self.value_of(source)].owner
                base = self.values[owner].tensor
                assert base is not None
                # By offsets: an empty view has no address.
                return self._add(
                    t, owner, int(t.storage_offset()) * t.itemsize - int(base.storage_offset()) * base.itemsize
                )
        return self._own(t)

    def launched(self, launch: Any, args: tuple[Any, ...]) -> None:
        self.steps.append(Launched(launch, self.replaced(args)))

    def constant(self, t: Tensor) -> None:
        """A tensor of this stream that every such call uses again."""
        self.bound = True
        if id(t) not in self._index:
            self.constants[self._own(t)] = t


_records: dict[int, Record] = {}  # by thread


def current() -> Record | None:
    """The record that this thread writes."""
    return _records.get(get_ident()) if _records else None


__all__ = ["Allocation", "Launched", "Operation", "Record", "Ref", "current"]
