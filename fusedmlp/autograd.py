"""Autograd of the operations: what is kept for backward, what is made again.

Kept: the inputs themselves (weights cost nothing), and of the hidden layer 2H values a token for gated MLPs, H for
two-layer ones, nothing of it with ``recompute``. Saved tensors are unpacked once. Nothing is written in place. When
a backward is itself differentiated (``create_graph=True``), the gradients come from the plain PyTorch meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import plan as plans
from .checks import autocasting
from .operations import OPERATIONS
from .plan import Plan


class Fused(torch.autograd.Function):
    """Any of the operations; operands are x, then all weights, then all biases."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, recompute: bool, x: Tensor, *operands: Tensor | None) -> Tensor:
        operation = OPERATIONS[plan.op]
        layers = len(operands) // 2
        save = not recompute and operation.keeps(ctx.needs_input_grad[2:])
        y, saved = operation.forward(plan, x, operands[:layers], operands[layers:], save)
        # An alias, not a view: users may change the result in place.
        out = y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))
        # An output is saved as what forward returns: autograd then keeps no reference from the graph to itself.
        ctx.save_for_backward(x, *operands, *[out if t is y else t for t in saved])
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[2:]
        operands, saved = len(needs) - 1, ctx.saved_tensors
        x, layers = saved[0], operands // 2
        weights, biases, kept = saved[1 : 1 + layers], saved[1 + layers : 1 + operands], saved[1 + operands :]
        if autocasting(x.device.type):
            # Backward works in the dtypes that forward chose, whatever autocast says where it runs.
            with torch.autocast(x.device.type, enabled=False):
                return None, None, *_gradients(ctx.plan, x, weights, biases, kept, needs, gy)
        return None, None, *_gradients(ctx.plan, x, weights, biases, kept, needs, gy)


def _gradients(
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needs: Sequence[bool],
    gy: Tensor,
) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return _differentiable(plan, x, weights, biases, needs, gy)
    if plan.precision and plan.precision != plans.fp32_precision():
        # Products follow the setting of this moment; forward ran under another.
        plan = plans.find(plan.op, plan.activation, x, weights, biases)
    elif plan.layout != plans.layout_of(x, weights):
        # Hooks on saved tensors (offloading) may hand back copies that lie in memory in another way.
        plan = plans.find(plan.op, plan.activation, x, weights, biases)
    if x.dim() == 2:
        return OPERATIONS[plan.op].backward(plan, gy, x, weights, biases, kept, needs)  # type: ignore[no-any-return]
    kept = [t.view(-1, t.shape[-1]) for t in kept]
    dx, *rest = OPERATIONS[plan.op].backward(plan, gy, x, weights, biases, kept, needs)
    return None if dx is None else dx.view(x.shape), *rest


def _differentiable(
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    needs: Sequence[bool],
    gy: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients that have a graph of their own, by PyTorch's operations."""
    inputs = (x, *weights, *biases)
    with torch.enable_grad():
        y = OPERATIONS[plan.op].reference(x, weights, biases, plan.activation)
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
        grads = iter(torch.autograd.grad(y, wanted, gy, create_graph=True))
    return tuple(next(grads) if need and t is not None else None for t, need in zip(inputs, needs, strict=True))
