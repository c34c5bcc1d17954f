"""Guess how many kernels a call will launch, before anything is profiled.

Eager: one kernel for every operation that computes. Fused: the launches of our plan in the place of a layer's
operations. Compiled: what torch.compile's Inductor does by rule, one kernel for each product and one for each group of
elementwise operations and reductions that hang together by their inputs. None of this looks at a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .. import explain, operations, saving
from .host_counts import HostCounter, composite

LONG_SUM = 1024  # elements that a sum adds up into one, beyond which Inductor splits it
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward")


@dataclass(frozen=True)
class Guess:
    """kernels: how many a call should launch. parts: what they are, in order. why: where the number comes from."""

    kernels: int
    parts: tuple[str, ...]
    why: str


def guess_eager(call: Callable[[], Any]) -> Guess:
    """Runs ``call()`` twice and notes what PyTorch dispatches in the second."""
    names = _dispatched(call)
    return Guess(len(names), tuple(names), "one kernel for every operation that computes")


def guess_fused(call: Callable[[], Any]) -> Guess:
    """Runs ``call()`` twice; the plans of our layers count as the launches that they say they are."""
    names = _dispatched(call, planned=True)
    return Guess(len(names), tuple(names), "the launches of each layer's plan, and other operations")


def _dispatched(call: Callable[[], Any], planned: bool = False) -> list[str]:
    call()  # what a first call makes for itself is not guessed
    counter = HostCounter(triton=not planned)
    with _planned(counter.names) if planned else nullcontext():
        counter.start()
        try:
            call()
        finally:
            counter.stop()
    return counter.names


@contextmanager
def _planned(names: list[str]) -> Iterator[None]:
    """While this lasts, each operation of ours adds the launches of its plan to ``names``; what it does itself is not
    watched."""

    def stand_in(op: str, module: Any) -> Any:
        def forward(plan: Any, x: Any, weights: Any, biases: Any, save: int) -> Any:
            names.extend(f"{op}: {text}" for text in explain.launches(plan, save)[0])
            with _disable_current_modes():
                return module.forward(plan, x, weights, biases, save)

        def backward(plan: Any, gy: Any, x: Any, weights: Any, biases: Any, kept: Any, *rest: Any) -> Any:
            save = saving.HIDDEN if kept else saving.INPUT
            names.extend(f"{op}: {text}" for text in explain.launches(plan, save)[1])
            with _disable_current_modes():
                return module.backward(plan, gy, x, weights, biases, kept, *rest)

        return SimpleNamespace(**{**vars(module), "forward": forward, "backward": backward})

    plain = dict(operations.OPERATIONS)
    operations.OPERATIONS.update({op: stand_in(op, module) for op, module in plain.items()})
    try:
        yield
    finally:
        operations.OPERATIONS.update(plain)


def guess_compiled(forward: Callable[[], Any], step: Callable[[], Any] | None = None) -> Guess:
    """Runs the eager code once, and groups its operations as Inductor would.

    A training step is compiled as two graphs, the forward and the backward, which share no kernel: so with ``step`` the
    guess is the forward's, and that of what the step does beyond it.
    """
    parts = _grouped(forward)
    if step is not None:
        ahead = len(_record(forward))
        parts += _grouped(step, ahead)
    return Guess(
        len(parts), tuple(parts), "one kernel a product, one a group of elementwise operations that share inputs"
    )


@dataclass
class _Node:
    name: str
    inputs: list[int]
    outputs: list[int]
    direct: tuple[int, ...] = ()  # inputs that are no views
    long: bool = False  # a sum over so many elements that it takes two kernels

    @property
    def product(self) -> bool:
        return self.name in PRODUCTS or "attention" in self.name


class _Recorder(HostCounter):
    """Notes which operation reads the result of which; views count as what they view."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[_Node] = []
        self._alive: list[Any] = []  # so that no identity is used twice
        self._viewed: dict[int, int] = {}

    def _base(self, tensor: torch.Tensor) -> int:
        return self._viewed.get(id(tensor), id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if composite(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        before = len(self.names)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._alive += [*inputs, *outputs]
        if len(self.names) == before:  # no kernel: a view, or a copy that Inductor folds into its readers
            for out in outputs:
                if inputs:
                    self._viewed[id(out)] = self._base(inputs[0])
            return result
        name = func._schema.name.split("::")[1].rstrip("_")
        direct = tuple(id(t) for t in inputs if id(t) not in self._viewed)
        long = name == "sum" and inputs[0].numel() > LONG_SUM * max(1, outputs[0].numel())
        self.nodes.append(_Node(name, [self._base(t) for t in inputs], [id(t) for t in outputs], direct, long))
        return result


def _record(call: Callable[[], Any]) -> list[_Node]:
    call()
    recorder = _Recorder()
    recorder.start()
    try:
        call()
    finally:
        recorder.stop()
    return recorder.nodes


def _grouped(call: Callable[[], Any], skip: int = 0) -> list[str]:
    """Kernels of the operations of ``call()`` behind the first ``skip``, in words."""
    nodes = _record(call)[skip:]
    made = {out: i for i, node in enumerate(nodes) for out in node.outputs}
    group = list(range(len(nodes)))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    readers: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if node.product or _folded(node, nodes, made):
            continue
        for source in node.inputs:
            writer = made.get(source)
            near = writer if writer is not None and not nodes[writer].product else readers.get(source)
            if near is not None and near != i:
                group[root(i)] = root(near)
            readers[source] = i
    kept = [i for i, node in enumerate(nodes) if not _folded(node, nodes, made)]
    words: dict[int, list[str]] = {}
    for i in kept:
        words.setdefault(i if nodes[i].product else root(i), []).append(nodes[i].name)
    second = [f"second half of {node.name}" for node in nodes if node.long]
    return [" + ".join(names) for names in words.values()] + second


def _folded(node: _Node, nodes: Sequence[_Node], made: dict[int, int]) -> bool:
    """An addition to a product's result, which Inductor lets the next product accumulate."""
    writers = [made.get(source) for source in node.direct]
    return node.name == "add" and len(writers) == 2 and all(w is not None and nodes[w].product for w in writers)
