"""Makes a program of the compiled launcher out of a record: what is left out, what is freed when, where tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from .record import Allocation, Launched, Operation, Record, Ref

_aten = torch.ops.aten
# The same by PyTorch's Python bindings, which take fewer detours.
_BINDINGS: dict[Any, Any] = {
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten.addmm.out: torch.addmm,
    _aten.t.default: torch.t,
    _aten.unsafe_split.Tensor: torch.unsafe_split,
    _aten.view.default: Tensor.view,
}
if hasattr(torch, "_addmm_activation"):  # private, as its name says
    _BINDINGS[_aten._addmm_activation.default] = torch._addmm_activation
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default}


@dataclass
class Spec:
    """The arguments of ``_launcher.Program``, and of its ``Plan``; ``launches``: the kernels in order."""

    inputs: int
    values: int
    slots: tuple[tuple[int, ...], ...]
    kernels: tuple[tuple[Any, ...], ...]
    steps: tuple[tuple[Any, ...], ...]
    outputs: tuple[int | None, ...]
    launches: tuple[Launched, ...]


def _refs(argument: Any) -> list[int]:
    if isinstance(argument, Ref):
        return [argument.value]
    if isinstance(argument, (tuple, list)):
        return [v for a in argument for v in _refs(a)]
    if isinstance(argument, dict):
        return _refs(list(argument.values()))
    return []


class _Builder:
    def __init__(self, record: Record, outputs: Sequence[Tensor | None], inputs: int) -> None:
        self.record, self.inputs = record, inputs
        self.outputs = [None if t is None else record.value_of(t) for t in outputs]
        self.slots: dict[tuple[int, ...], int] = {}
        self.steps = self._in_final_shape(self._live(record.steps))
        self.objects = self._objects(self.steps)

    def owner(self, value: int) -> int:
        return self.record.values[value].owner

    # What must run, and what must be a tensor rather than memory.

    def _objects(self, steps: Sequence[Any]) -> set[int]:
        """Values that an operation or the caller takes as tensors."""
        found = {v for v in self.outputs if v is not None}
        for step in steps:
            if isinstance(step, Operation):
                found.update(_refs(step.args), _refs(step.kwargs))
        return found

    def _live(self, steps: Sequence[Any]) -> list[Any]:
        """Without operations whose results nobody takes as tensors: a launch takes views by their address."""
        objects = {v for v in self.outputs if v is not None}
        addresses = {self.owner(v) for s in steps if isinstance(s, Launched) for v in _refs(s.args)}
        kept = []
        for step in reversed(steps):
            if isinstance(step, Operation):
                made = [r for r in step.results if self.owner(r) == r and r in addresses]
                if not (step.writes or made or objects.intersection(step.results)):
                    continue
                objects.update(_refs(step.args), _refs(step.kwargs))
            kept.append(step)
        return kept[::-1]

    def _in_final_shape(self, steps: list[Any]) -> list[Any]:
        """Memory that is allocated to be seen in another shape only is allocated in that shape."""
        for step in [s for s in steps if isinstance(s, Operation) and s.function in _RESHAPES]:
            (result,), source = step.results, step.args[0].value
            made = [s for s in steps if isinstance(s, Allocation) and s.value == source]
            users = [s for s in steps if isinstance(s, Operation) and source in _refs(s.args) + _refs(s.kwargs)]
            seen = self.record.values[result].tensor
            if not made or users != [step] or source in self.outputs or seen is None or not seen.is_contiguous():
                continue
            if prod(made[0].shape) != seen.numel() or made[0].dtype != seen.dtype:
                continue
            self._rename(steps, result, source)
            steps = [
                replace(s, shape=tuple(seen.shape), stride=seen.stride()) if s is made[0] else s
                for s in steps
                if s is not step
            ]
        return steps

    def _rename(self, steps: Sequence[Any], old: int, new: int) -> None:
        def renamed(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return Ref(new) if argument.value == old else argument
            if isinstance(argument, (tuple, list)):
                return type(argument)(renamed(a) for a in argument)
            return argument

        self.outputs = [new if v == old else v for v in self.outputs]
        for s in steps:
            if isinstance(s, Operation):
                s.args, s.kwargs = renamed(s.args), {k: renamed(v) for k, v in s.kwargs.items()}

    # The steps as the launcher takes them.

    def _allocate(self, step: Allocation) -> tuple[Any, ...] | None:
        if step.value not in self.objects:
            size = prod(step.shape) * step.dtype.itemsize
            used = any(
                self.owner(v) == step.value for s in self.steps if isinstance(s, Launched) for v in _refs(s.args)
            )
            return ("take", step.value, size) if used and size else None
        for i, value in enumerate(self.record.values[: self.inputs]):
            t = value.tensor
            if t is not None and t.dtype == step.dtype and t.shape == step.shape and t.stride() == step.stride:
                return ("call", torch.empty_like, (None,), ((0, i),), None, (), (step.value,))
        like = next(i for i, v in enumerate(self.record.values) if v.tensor is not None)
        first = self.record.values[like].tensor
        assert first is not None
        if first.dtype == step.dtype:
            return ("call", Tensor.new_empty, (None, step.shape), ((0, like),), None, (), (step.value,))
        options = {"dtype": step.dtype, "device": first.device}
        return ("call", torch.empty, (step.shape,), (), options, (), (step.value,))

    def _operate(self, step: Operation) -> tuple[Any, ...] | None:
        places = tuple((i, a.value) for i, a in enumerate(step.args) if isinstance(a, Ref))
        named = tuple((k, a.value) for k, a in step.kwargs.items() if isinstance(a, Ref))
        if len(places) + len(named) != len(_refs(step.args) + _refs(step.kwargs)):
            return None  # a list of tensors
        args = tuple(None if isinstance(a, Ref) else a for a in step.args)
        rest = {k: a for k, a in step.kwargs.items() if not isinstance(a, Ref)} or None
        # What is written in place is there already; its owner's number stays its own.
        results = () if step.writes else step.results
        return ("call", _BINDINGS.get(step.function, step.function), args, places, rest, named, results)

    def _slot(self, *values: int) -> int:
        flat: list[int] = []
        for v in values:
            found = self.record.values[v]
            flat += (found.owner, found.offset)
        return self.slots.setdefault(tuple(flat), len(self.slots))

    def _kernel(self, step: Launched) -> tuple[Any, ...]:
        *head, parameters = step.launch.spec
        made: list[tuple[Any, ...]] = []
        for kind, position, *rest in parameters:
            if kind.startswith("constant"):
                made.append((kind, position, *rest))
                continue
            argument = step.args[position]
            if kind in ("int32", "int64"):
                made.append((kind.replace("int", "constant"), int(argument)))
            elif argument is None:
                made.append(("constant64", 0))
            elif kind == "address" and self.owner(argument.value) in self.record.constants:
                found = self.record.values[argument.value]
                address = self.record.constants[found.owner].data_ptr() + found.offset
                made.append(("constant64", address if address < 1 << 63 else address - (1 << 64)))
            else:
                made.append((kind, self._slot(*_refs(argument)), *rest))
        return (*head, tuple(made))

    def _frees(self, steps: list[tuple[Any, ...]], launches: Sequence[Launched]) -> tuple[tuple[Any, ...], ...]:
        """The steps with a value's end behind its last use."""
        last: dict[int, int] = {}
        born: dict[int, str] = {}
        for n, step in enumerate(steps):
            if step[0] == "launch":
                used = [
                    self.owner(v) for launched in launches[step[1] : step[1] + step[2]] for v in _refs(launched.args)
                ]
            elif step[0] == "take":
                used, born[step[1]] = [step[1]], "give"
            else:
                used = [v for _, v in (*step[3], *step[5])] + list(step[6])
                born |= dict.fromkeys(step[6], "drop")
            last |= dict.fromkeys(used, n)
        done: list[tuple[Any, ...]] = []
        for n, step in enumerate(steps):
            done.append(step)
            ends = [v for v, at in last.items() if at == n and v in born and v not in self.outputs]
            done += [(born[v], v) for v in ends]
        return tuple(done)

    def spec(self) -> Spec | None:
        if -1 in self.outputs or any(self.owner(v) in self.record.constants for v in self.objects):
            return None
        made: list[tuple[Any, ...]] = []
        launches = [s for s in self.steps if isinstance(s, Launched)]
        kernels = []
        for step in self.steps:
            if isinstance(step, Launched):
                kernels.append(self._kernel(step))
                made.append(("launch", len(kernels) - 1, 1))
                continue
            entry = self._allocate(step) if isinstance(step, Allocation) else self._operate(step)
            if entry is None and isinstance(step, Operation):
                return None
            if entry is not None:
                made.append(entry)
        steps = self._frees(made, launches)
        values = len(self.record.values)
        return Spec(self.inputs, values, tuple(self.slots), tuple(kernels), steps, tuple(self.outputs), tuple(launches))


def specify(record: Record, outputs: Sequence[Tensor | None], inputs: int) -> Spec | None:
    """What ``_launcher.Program`` takes for a record with that many inputs; None where it cannot run it."""
    if record.why is not None or any(isinstance(s, Launched) and s.launch.spec is None for s in record.steps):
        return None
    return _Builder(record, outputs, inputs).spec()
