"""What the parts of a call cost the host, by running each alone. ``bench/host.py --breakdown`` prints it.

A part is timed as the benchmarks time a call: in blocks that start with an idle device and do not wait for it. Parts
take turns. They are the package's own functions with the arguments of a real call, so that a line names what it times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fusedmlp import FusedGeGLUMLP, autograd, checks, functional, launch, plan, saving
from fusedmlp._children import plain_parts
from fusedmlp.activations import resolve_activation
from fusedmlp.operations import glu_mlp

Part = Callable[[], Any]


class Empty(torch.autograd.Function):
    """Does nothing: what PyTorch takes for a Function with the operands of a gated layer."""

    @staticmethod
    def forward(ctx: Any, settings: Any, flag: bool, x: Tensor, *operands: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *operands)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, gy, *[None] * 6


class Layer:
    """A GeGLU layer, an input, and the arguments with which a call reaches each function."""

    def __init__(self, tokens: int, hidden: int, intermediate: int, device: str, dtype: torch.dtype) -> None:
        self.module = FusedGeGLUMLP(hidden, intermediate, device=device, dtype=dtype)
        self.x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        self.gy = torch.randn(tokens, hidden, device=device, dtype=dtype)
        children = self.module.gate_proj, self.module.up_proj, self.module.down_proj
        self.weights = tuple(child.weight for child in children)
        self.none = (None, None, None)
        self.act = resolve_activation(self.module.activation)
        self.leaves = [self.x, *self.weights]
        self.step()  # makes every plan and launch
        with torch.no_grad():
            self.module(self.x)
            self.plan = plan.find("glu_mlp", self.act, self.x, self.weights, self.none)
            if self.plan.eager_reason is not None:
                raise RuntimeError(f"nothing of ours to take apart: {self.plan.eager_reason}")
            self.h, self.gate_up = self.plan.launchers.glu.glu_forward(
                self.plan, self.x, *self.weights[:2], None, None, True
            )
            self.launch, self.arguments = self.first_launch()

    def step(self) -> None:
        torch.autograd.backward(self.module(self.x), self.gy)
        for leaf in self.leaves:
            leaf.grad = None

    def first_launch(self) -> tuple[launch.Launch, tuple[Any, ...]]:
        """The launch that a forward starts with, and its arguments."""
        seen: list[tuple[launch.Launch, tuple[Any, ...]]] = []
        original = launch.Launch.__call__

        def record(self: launch.Launch, *args: Any) -> None:
            seen.append((self, args))
            original(self, *args)

        with mock.patch.object(launch.Launch, "__call__", record):
            self.module(self.x)
        return seen[0]


def forward_parts(layer: Layer) -> dict[str, Part]:
    """Of a forward without gradients, outermost first; each line holds the ones that it calls."""
    m, x, (gate, up, down), act, found = layer.module, layer.x, layer.weights, layer.act, layer.plan
    operands = (x, *layer.weights, *layer.none)
    empty, forward = nn.Identity(), type(m).forward
    M, H = x.shape[0], gate.shape[0]
    parts: dict[str, Part] = {
        "module call": lambda: m(x),
        "  nn.Module.__call__ of nothing": lambda: empty(x),
        "  forward, called directly": lambda: forward(m, x),
        "    are the three children plain": lambda: (
            [plain_parts(m._modules[n]) for n in ("gate_proj", "up_proj")] + [plain_parts(m._modules["down_proj"])]
        ),
        "    functional.glu_mlp": lambda: functional.glu_mlp(x, gate, up, down, None, None, None, m.activation),
        "      the activation's name": lambda: resolve_activation(m.activation),
        "      autocast": lambda: functional._autocast(x, layer.weights, layer.none),
        "      are the tensors plain": lambda: checks.plain(operands),
        "      plan look-up": lambda: plan.find("glu_mlp", act, x, layer.weights, layer.none),
        "      the operation: two allocations, two launches": lambda: glu_mlp.forward(
            found, x, layer.weights, layer.none, False
        ),
        "        hidden layer": lambda: found.launchers.glu.glu_forward(found, x, gate, up, None, None, False),
        "        last product": lambda: found.launchers.small.down(found, layer.h, down, None),
        "  an allocation [M, H]": lambda: x.new_empty(M, H),
        "  a cuBLAS product (torch.mm) of the last layer": lambda: torch.mm(layer.h, down.t()),
        f"  a launch, {launch.path()}": lambda: layer.launch(*layer.arguments),
    }
    return parts | other_launches(layer)


def other_launches(layer: Layer) -> dict[str, Part]:
    """The first kernel by Triton's own ways."""
    made, (index, *arguments) = layer.launch, layer.arguments
    if index is None:
        return {}
    public = made._public(tuple(arguments))
    parts: dict[str, Part] = {
        "  the same launch by Triton, kernel[grid]": lambda: made.kernel[(made.grid,)](
            *made._public(tuple(arguments)), *made.constants, **made.options
        )
    }
    compiled = made._compiled
    if compiled is not None:
        stream = torch.cuda.current_stream().cuda_stream
        head = (made.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None)
        parts["  the same launch by the compiled kernel's run"] = lambda: compiled.run(*head, *public, *made.constants)
    return parts


def step_parts(layer: Layer) -> dict[str, Part]:
    """Of a training step, with the backward in PyTorch's own thread or in the calling one."""
    m, x, found = layer.module, layer.x, layer.plan
    operands = (*layer.weights, *layer.none)
    needs = (True,) * 4 + (False,) * 3
    call = autograd.Call(found, saving.HIDDEN, needs, layer.none)
    apply = super(torch.autograd.Function, Empty).apply

    def empty_step() -> None:
        torch.autograd.backward(apply(None, False, x, *operands), layer.gy)
        x.grad = None

    def backward_alone() -> Any:
        with torch.no_grad():
            return glu_mlp.backward(found, layer.gy, x, layer.weights, layer.none, [layer.gate_up], needs)

    return {
        "training step": layer.step,
        "  module call with gradients": lambda: m(x),
        "    the Function alone, by its long way": lambda: autograd.apply(call, x, *operands),
        "    an empty Function with as many operands": lambda: apply(None, False, x, *operands),
        "  step of an empty Function": empty_step,
        "  the operations of the backward, called directly": backward_alone,
    }


def measure(parts: dict[str, Part], wait: Part, rounds: int = 30, calls: int = 20) -> dict[str, list[float]]:
    """Microseconds of host time of each part, a value a block."""
    for part in parts.values():
        part()
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            wait()
            begin = time.perf_counter()
            for _ in range(calls):
                part()
            times[name].append((time.perf_counter() - begin) * 1e6 / calls)
    wait()
    return times


def lines(title: str, times: dict[str, list[float]]) -> list[str]:
    head = f"{title:62}{'median':>9}{'low':>9}{'high':>9}"
    return [head, *[f"{n:62}{statistics.median(t):>9.2f}{min(t):>9.2f}{max(t):>9.2f}" for n, t in times.items()], ""]


def report(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, rounds: int = 30, calls: int = 20) -> str:
    """The whole breakdown as text: host time in microseconds, of GeGLU 768 -> 3072 on a GPU."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    widths = (768, 3072) if device == "cuda" else (16, 32)
    found: list[str] = []
    layer = Layer(1, *widths, device, dtype)
    with torch.no_grad():
        found += lines("forward without gradients, M=1", measure(forward_parts(layer), wait, rounds, calls))
    layer = Layer(128 if device == "cuda" else 4, *widths, device, dtype)
    found += lines("training step, M=128", measure(step_parts(layer), wait, rounds, calls // 2))
    with torch.autograd.set_multithreading_enabled(False):  # type: ignore[attr-defined]
        found += lines("the same, backward in the calling thread", measure(step_parts(layer), wait, rounds, calls // 2))
    return "\n".join(found)
