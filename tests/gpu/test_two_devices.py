"""Layers on a device that is not the current one, and on two at once: plans, steady calls, counters, graphs.

What the rest of the suite holds against float64 on the first device, another must give bit for bit. One process sees
both devices only without workers: python -m pytest -m gpu tests/gpu/test_two_devices.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedmlp

pytestmark = pytest.mark.gpu

WIDTH, HIDDEN, DTYPE = 256, 512, torch.bfloat16
FIRST = torch.device("cuda", 0)
MAKE: dict[str, Callable[[torch.device], nn.Module]] = {
    "geglu": lambda device: fusedmlp.FusedGeGLUMLP(WIDTH, HIDDEN, bias=True, device=device, dtype=DTYPE),
    "mlp": lambda device: fusedmlp.FusedMLP(WIDTH, HIDDEN, device=device, dtype=DTYPE),
    "linear_relu": lambda device: fusedmlp.FusedLinearReLU(WIDTH, WIDTH, device=device, dtype=DTYPE),
    "stack": lambda device: fusedmlp.FusedReLUMLP([WIDTH] * 4, device=device, dtype=DTYPE),
}
TOKENS = [1, 24, 200, 1024]
CALLS = 4  # planned, recorded, and twice from the table
Results = list[Tensor]


def step(module: nn.Module, x: Tensor, gy: Tensor) -> Results:
    """Output without grad, output with grad, gradients of x and the parameters."""
    with torch.no_grad():
        alone = module(x)
    x = x.detach().requires_grad_()
    y = module(x)
    return [alone, y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], gy)]


def expected(module: nn.Module, x: Tensor, gy: Tensor) -> Results:
    """The same step of a copy on the first device."""
    with torch.cuda.device(FIRST):
        return step(copy.deepcopy(module).to(FIRST), x.to(FIRST), gy.to(FIRST))


def check(found: Results, right: Results, device: torch.device) -> None:
    for ours, theirs in zip(found, right, strict=True):
        assert ours.device == device
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0)


def inputs(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x, gy = torch.randn(2, tokens, WIDTH, device=device, dtype=DTYPE)
    return x, gy


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", MAKE)
def test_on_a_device_that_is_not_current(kind: str, tokens: int, second_device: torch.device) -> None:
    layer = MAKE[kind](second_device)
    x, gy = inputs(tokens, second_device)
    right = expected(layer, x, gy)
    for _ in range(CALLS):
        check(step(layer, x, gy), right, second_device)
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", MAKE)
def test_devices_in_turn(kind: str, tokens: int, second_device: torch.device) -> None:
    """The same shapes on both, whose plans, tables and counters are each device's own."""
    cases = []
    for device in (FIRST, second_device):
        layer = MAKE[kind](device)
        x, gy = inputs(tokens, device)
        cases.append((layer, x, gy, expected(layer, x, gy), device))
    for current in (0, 1, 0, 1):
        with torch.cuda.device(current):
            for layer, x, gy, right, device in cases:
                for _ in range(CALLS):
                    check(step(layer, x, gy), right, device)
                assert torch.cuda.current_device() == current


@pytest.mark.parametrize("kind", MAKE)
def test_a_graph_of_the_second_device(kind: str, second_device: torch.device) -> None:
    layer = MAKE[kind](second_device)
    x, gy = inputs(24, second_device)
    fusedmlp.warmup(layer, 24, training=True)
    x.requires_grad_()
    with torch.cuda.device(second_device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
            grads = torch.autograd.grad(y, [x, *layer.parameters()], gy)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            gy.copy_(torch.randn_like(gy))
        torch.cuda.synchronize(second_device)
        with torch.cuda.device(second_device):
            graph.replay()
        torch.cuda.synchronize(second_device)
        check([y.detach(), *grads], expected(layer, x.detach(), gy)[1:], second_device)


@pytest.mark.parametrize("kind", MAKE)
def test_operands_of_two_devices_are_refused(kind: str, second_device: torch.device) -> None:
    layer = MAKE[kind](second_device)
    here, there = inputs(24, FIRST)[0], inputs(24, second_device)[0]
    for _ in range(CALLS):
        layer(there)
        with pytest.raises(RuntimeError, match="cuda:[01]"):
            layer(here)


def test_a_model_whose_halves_lie_on_two_devices(second_device: torch.device) -> None:
    """Backward runs in a thread per device."""
    first, second = (MAKE["geglu"](device) for device in (FIRST, second_device))
    x, gy = inputs(200, FIRST)
    x.requires_grad_()

    def both(last: nn.Module, device: torch.device) -> Results:
        y = last(first(x).to(device))
        return [y.detach(), *torch.autograd.grad(y, [x, *first.parameters(), *last.parameters()], gy.to(device))]

    right = both(copy.deepcopy(second).to(FIRST), FIRST)
    for _ in range(CALLS):
        for ours, theirs in zip(both(second, second_device), right, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0)
