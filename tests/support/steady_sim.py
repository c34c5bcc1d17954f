"""Stands for the compiled launcher's tables and programs where Triton's interpreter runs the kernels.

Programs are run step by step as the launcher does, on memory that is full of NaN when it is taken and again once it
was given back, so that a step that is missing, in the wrong place, or reads what is gone, shows in the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusedmlp import explain, settings, steady
from fusedmlp import plan as plans
from fusedmlp.launch import Launch
from fusedmlp.program import Spec
from fusedmlp.record import Launched, Record, Ref


def _poisoned(size: int) -> Tensor:
    return torch.full((size,), 0xFF, dtype=torch.uint8)


class Program:
    """``_launcher.Program``; what the arguments of its launches look like comes from the record that was last seen."""

    def __init__(self, seen: tuple[Record, Spec], spec: Sequence[Any]) -> None:
        _, self.inputs, self.count, self.slots, self.steps, self.outputs, self.single, _ = spec
        record, full = seen
        self.launches: tuple[Launched, ...] = full.launches
        self.kernels = full.kernels
        self.looks = [
            None if v.tensor is None else (v.tensor.shape, v.tensor.stride(), v.tensor.dtype) for v in record.values
        ]
        self.places = [(v.owner, v.offset) for v in record.values]
        self.constants = dict(record.constants)
        self.runs = 0

    def run(self, *inputs: Tensor | None) -> Any:
        assert len(inputs) == self.inputs
        self.runs += 1
        objects: dict[int, Tensor | None] = dict(enumerate(inputs))
        raw: dict[int, Tensor] = {}
        for kind, *rest in self.steps:
            if kind == "call":
                self._call(objects, *rest)
            elif kind == "take":
                raw[rest[0]] = _poisoned(rest[1])
            elif kind == "give":
                raw.pop(rest[0]).fill_(0xFF)
            elif kind == "drop":
                del objects[rest[0]]
            else:
                assert kind == "launch"
                for i in range(rest[0], rest[0] + rest[1]):
                    self._launch(objects, raw, i)
        assert not raw, "memory was not given back"
        results = tuple(None if v is None else objects[v] for v in self.outputs)
        left = set(objects) - set(range(self.inputs)) - set(self.outputs)
        assert not left, f"values {left} live to the end"
        return results[0] if self.single else results

    def _call(self, objects: dict[int, Any], function: Any, args: Any, places: Any, kwargs: Any, named: Any, to: Any):
        filled = list(args)
        for i, value in places:
            filled[i] = objects[value]
        found = function(*filled, **(kwargs or {}), **{k: objects[v] for k, v in named})
        if not to:
            return
        results = (found,) if isinstance(found, Tensor) else found
        assert len(results) == len(to)
        for value, t in zip(to, results, strict=True):
            if function in (torch.empty_like, Tensor.new_empty, torch.empty):
                t.view(torch.uint8).fill_(0xFF)
            objects[value] = t

    def _launch(self, objects: dict[int, Any], raw: dict[int, Tensor], index: int) -> None:
        launched = self.launches[index]

        def tensor(value: int) -> Tensor:
            owner, offset = self.places[value]
            if owner in self.constants:
                base = self.constants[owner]
            else:
                assert (owner, offset) in [pair for s in self.slots for pair in (s[:2], s[2:])]
                base = raw[owner] if owner in raw else objects[owner]
            shape, stride, dtype = self.looks[value]
            start = base.data_ptr() - base.untyped_storage().data_ptr() + offset
            assert start % dtype.itemsize == 0
            seen = torch.empty(0, dtype=dtype)
            return seen.set_(base.untyped_storage(), start // dtype.itemsize, shape, stride)

        def real(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return tensor(argument.value)
            return tuple(map(real, argument)) if isinstance(argument, tuple) else argument

        launched.launch(None, *map(real, launched.args))


class Table:
    """``_launcher.Table``, whose keys here are the layouts, which gradients are needed, and the order of a pair."""

    made: list[Table] = []
    capturing = False  # what is bound does not serve then

    def __init__(self, pair: int) -> None:
        self.pair, self.entries, self.hits = pair, {}, 0
        Table.made.append(self)

    def _key(self, operands: Sequence[Tensor | None]) -> Any:
        recorded = torch.is_grad_enabled()
        parts: list[Any] = [plans.fp32_precision(), settings.overridden()]
        for t in operands:
            parts.append(
                t if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16, recorded and t.requires_grad)
            )
        if self.pair >= 0:
            a, b = operands[self.pair], operands[self.pair + 1]
            if a is not None and b is not None:
                parts.append((a.data_ptr() < b.data_ptr(), a.data_ptr() == b.data_ptr()))
        return tuple(parts)

    def call(self, *operands: Tensor | None) -> Any:
        if explain._recorders or not all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in operands):
            return None
        if any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in operands):
            return None
        value, bound = self.entries.get(self._key(operands), (None, False))
        if value is None or (bound and Table.capturing):
            return None
        self.hits += 1
        return value.run(*operands) if isinstance(value, Program) else value(*operands)

    def add(self, value: Any, bound: bool, *operands: Tensor | None) -> bool:
        self.entries[self._key(operands)] = value, bound
        return True

    def clear(self) -> None:
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


class Launcher:
    """``fusedmlp._launcher``."""

    def __init__(self) -> None:
        self.seen: Any = None
        self.programs: list[Program] = []
        self.refused: list[Record] = []  # no program could be made of them

    def Plan(self, *args: Any) -> Any:
        return args

    Table = Table

    def Program(self, *args: Any) -> Program:
        made = Program(self.seen, args)
        self.programs.append(made)
        return made


def _kernel(args: Sequence[Any]) -> tuple[Any, ...]:
    """A kernel's description whose parameters are its arguments."""
    kinds: list[tuple[Any, ...]] = []
    for i, a in enumerate(args):
        kind = "map" if isinstance(a, tuple) else "int64" if isinstance(a, int) else "address"
        kinds.append((kind, i))
    return ("kernel", tuple(kinds))


@contextmanager
def simulated() -> Iterator[Launcher]:
    """Calls are steady inside, from the third of a kind on."""
    launcher = Launcher()
    launched, specify = Record.launched, steady.specify

    def described(self: Record, launch: Launch, args: tuple[Any, ...]) -> None:
        launch.spec = _kernel(args)
        launched(self, launch, args)

    def remembered(record: Record, outputs: Any, inputs: int) -> Any:
        spec = specify(record, outputs, inputs)
        launcher.seen = (record, spec)
        if spec is None:
            launcher.refused.append(record)
        return spec

    plans.clear()
    Table.made = []
    with (
        mock.patch.object(steady, "_launcher", launcher),
        mock.patch.object(steady, "_connected", True),
        mock.patch.object(steady, "_tables", {}),
        mock.patch.object(steady, "specify", remembered),
        mock.patch.object(steady, "_served", return_value=True),
        mock.patch.object(steady, "_busy", ()),  # settings are overridden to choose kernels
        mock.patch.object(Record, "launched", described),
    ):
        yield launcher
    plans.clear()
