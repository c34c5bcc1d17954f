"""One operation at one shape: its input sets, and the calls of each variant on them."""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from torch import Tensor

from bench import common
from bench.variants import OPS, VARIANTS, Built, eager_module

DTYPE = torch.bfloat16
Shape = tuple[int, int, int]  # tokens, hidden, intermediate


def parse_shape(text: str) -> Shape:
    """ "8192x768x3072" -> (8192, 768, 3072)."""
    try:
        tokens, hidden, intermediate = (int(n) for n in text.strip().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shape is TOKENSxHIDDENxINTERMEDIATE, got {text!r}") from None
    if min(tokens, hidden, intermediate) < 1:
        raise argparse.ArgumentTypeError(f"sizes are positive in TOKENSxHIDDENxINTERMEDIATE, got {text!r}")
    return tokens, hidden, intermediate


def bytes_of(op: str, shape: tuple[int, int, int]) -> int:
    """Bytes of a 16-bit input set: x, the upstream gradient and the weights."""
    tokens, hidden, intermediate = shape
    return 2 * (2 * tokens * hidden + OPS[op].matrices * hidden * intermediate)


class Case:
    """Inputs, upstream gradients and eager modules of every set; variants are added by name.

    The sets that take turns are larger than the L2 cache; all variants compute on the same ones. x requires a
    gradient, and gradients start as None.
    """

    def __init__(
        self,
        op: str,
        shape: tuple[int, int, int],
        device: str = "cuda",
        sets: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = DTYPE,
    ) -> None:
        tokens, hidden, intermediate = shape
        torch.manual_seed(seed)
        self.op, self.shape, self.dtype = op, shape, dtype
        self.sets = sets or common.input_sets(bytes_of(op, shape))
        torch._dynamo.reset()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.eager = [eager_module(op, hidden, intermediate, **options) for _ in range(self.sets)]
        self.x = [torch.randn(tokens, hidden, requires_grad=True, **options) for _ in range(self.sets)]
        self.dy = [torch.randn(tokens, hidden, **options) for _ in range(self.sets)]
        self.built: dict[str, list[Built]] = {}
        self.inputs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, name: str) -> None:
        self.built[name] = [VARIANTS[name].build(self.op, m) for m in self.eager]
        self.inputs[name] = self._inputs_of(name)

    def _inputs_of(self, name: str) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.x, self.dy, strict=True)
        if VARIANTS[name].batched:  # leaves of their own, so that the step has no view to differentiate
            return [(x.detach()[None].requires_grad_(), dy[None]) for x, dy in pairs]
        return list(pairs)

    def at(self, tokens: int, sets: int | None = None) -> Case:
        """This case with its first ``tokens`` tokens: the same modules, as many sets as that needs (or ``sets``).

        Raises:
            BenchError: it has fewer tokens or sets.
        """
        shape = (tokens, *self.shape[1:])
        sets = sets or min(self.sets, common.input_sets(bytes_of(self.op, shape)))
        if tokens > self.shape[0] or sets > self.sets:
            raise common.BenchError(f"a case of {self.shape[0]} tokens, {self.sets} sets has no {tokens}, {sets}")
        part = copy.copy(self)
        part.shape, part.sets, part.eager = shape, sets, self.eager[:sets]
        part.x = [x.detach()[:tokens].requires_grad_() for x in self.x[:sets]]
        part.dy = [dy[:tokens] for dy in self.dy[:sets]]
        part.built = {name: built[:sets] for name, built in self.built.items()}
        part.inputs = {name: part._inputs_of(name) for name in self.built}
        return part

    def forward(self, name: str) -> common.Call:
        built, inputs = self.built[name], self.inputs[name]

        def call(i: int) -> Tensor:
            with torch.no_grad():
                return built[i].module(inputs[i][0])

        return call

    def step(self, name: str) -> common.Call:
        inputs = self.inputs[name]
        modules = [b.module for b in self.built[name]]
        leaves = [[pair[0], *b.parameters] for pair, b in zip(inputs, self.built[name], strict=True)]

        def call(i: int) -> None:
            x, dy = inputs[i]
            torch.autograd.backward(modules[i](x), dy)
            for leaf in leaves[i]:
                leaf.grad = None

        return call

    def keep(self, name: str) -> common.Call:
        """A forward that keeps for a backward what it needs."""
        built, inputs = self.built[name], self.inputs[name]
        return lambda i: built[i].module(inputs[i][0])

    def warm_up(self, call: common.Call) -> float:
        """Runs every set; returns about how long one call takes, in microseconds."""
        again = min(3, self.sets)
        for i in range(self.sets):
            call(i)
        self.wait()
        begin = time.perf_counter()
        for i in range(again):
            call(i)
        self.wait()
        return (time.perf_counter() - begin) * 1e6 / again

    def wait(self) -> None:
        if self.x[0].is_cuda:
            torch.cuda.synchronize()

    def errors(self, name: str) -> dict[str, float]:
        """Relative error against float64 on set 0: of the output, and the largest one of the gradients."""
        truth = copy.deepcopy(self.eager[0]).double()
        x64 = self.x[0].detach().double().requires_grad_()
        y64 = truth(x64)
        torch.autograd.backward(y64, self.dy[0].double())
        built, (x, dy) = self.built[name][0], self.inputs[name][0]
        leaves = [x, *built.parameters]
        try:
            y = built.module(x)
            torch.autograd.backward(y, dy)
            found = [x.grad, *built.gradients()]
            exact = [x64.grad, *(p.grad for p in truth.parameters())]
            if any(g is None for g in found):
                raise common.BenchError(f"{name} leaves a gradient out")
            pairs: list[Any] = list(zip(found, exact, strict=True))
            worst = max(common.relative_error(a.reshape(b.shape), b) for a, b in pairs)
            forward = common.relative_error(y.detach().reshape(y64.shape), y64.detach())
        finally:
            for leaf in leaves:
                leaf.grad = None
        return {"forward": forward, "step": worst}
