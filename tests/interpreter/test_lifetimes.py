"""Tensors and backwards in places where PyTorch hands over something else than it was given."""

from __future__ import annotations

import pytest
import torch
from support.interpreter import repair
from torch import Tensor
from torch._dynamo import compiled_autograd

from fusedmlp import functional, settings

repair()


def operands(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("family", ["tma", "pointer"])
def test_a_saved_tensor_that_comes_back_packed_at_its_old_address(family):
    """An offloading hook returns a contiguous copy, and the allocator puts it where the strided one lay."""
    M, D, H = 24, 64, 48
    base, gate, up, down = (t.bfloat16() for t in operands((M, 2 * D), (H, D), (H, D), (D, H)))
    gy = torch.randn(M, D, dtype=torch.bfloat16)

    def grads(move: bool) -> tuple[Tensor, ...]:
        wide = base.detach().clone()
        x = wide[:, :D]

        def unpack(t: Tensor) -> Tensor:
            if not move or t.data_ptr() != wide.data_ptr():
                return t
            values = t.clone()
            wide.fill_(torch.nan)
            packed = wide.view(-1)[: M * D].view(M, D)
            packed.copy_(values)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() if t is x else t, unpack):
            y = functional.glu_mlp(x, gate, up, down, recompute=True)
        return torch.autograd.grad(y, (gate, up, down), gy)  # the launches of the first call are kept

    with settings.override(family=family):
        expected, found = grads(False), grads(True)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_autograd_sees_pytorchs_operations(recompute):
    x, fc1, fc2, b1 = leaves = operands((8, 16), (32, 16), (16, 32), (32,))
    functional.mlp(*leaves, recompute=recompute).sum().backward()
    expected = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    torch._dynamo.reset()
    y = functional.mlp(*leaves, recompute=recompute)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    for t, right in zip(leaves, expected, strict=True):
        torch.testing.assert_close(t.grad, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["x", "bias"])
def test_a_tensor_that_outlived_its_transform(which):
    """torch.func leaves a wrapper behind, which PyTorch's own operations look through."""
    left: dict[str, Tensor] = {}

    def leak(v: Tensor) -> Tensor:
        left["v"] = v * 2
        return (v**2).sum()

    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(4, 8)
    torch.func.grad(leak)(x if which == "x" else bias)
    given = (left["v"], weight, bias) if which == "x" else (x, weight, left["v"])
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(*given))
    torch.testing.assert_close(functional.linear_act(*given, "gelu"), expected)


def test_a_bias_made_in_inference_mode():
    x, weight = operands((4, 8), (6, 8))
    with torch.inference_mode():
        bias = torch.randn(6)
    functional.linear_act(x, weight, bias, "gelu").sum().backward()
    assert x.grad is not None
