"""Autograd of the operations: what is kept for backward, what is made again.

Kept: the inputs themselves (weights cost nothing), and of the hidden layer 2H values a token for gated MLPs (3H with
``keep_activation``), H for two-layer ones, nothing of it with ``recompute``. Saved tensors are unpacked once. Nothing
is written in place. When a backward is itself differentiated (``create_graph=True``), the gradients come from the plain
PyTorch meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import plan as plans
from . import saving
from .checks import autocasting
from .operations import OPERATIONS
from .plan import Plan


class Fused(torch.autograd.Function):
    """Any of the operations; operands are x, then all weights, then all biases."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, save: int, x: Tensor, *operands: Tensor | None) -> Tensor:
        layers = len(operands) // 2
        weights, biases = operands[:layers], operands[layers:]
        level = plan.kept(save, ctx.needs_input_grad[2:])
        y, kept = OPERATIONS[plan.op].forward(plan, x, weights, biases, level)
        # An alias, not a view: users may change the result in place.
        out = y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))
        # An output is saved as what forward returns: autograd then keeps no reference from the graph to itself.
        saved = (x, *weights, *[out if t is y else t for t in kept])
        ctx.save_for_backward(*saved)
        # Biases are no part of a backward, so users may change them before it, unless forward is to be run again.
        versions = [None if b is None or b.is_inference() else b._version for b in biases]
        places = [(t.data_ptr(), t.stride()) for t in saved]  # type: ignore[union-attr]
        ctx.call = plan, save, biases, versions, places
        return out

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        device_type = ctx.call[0].device.type
        if autocasting(device_type):
            # Backward works in the dtypes that forward chose, whatever autocast says where it runs.
            with torch.autocast(device_type, enabled=False):
                return None, None, *_gradients(ctx, gy)
        return None, None, *_gradients(ctx, gy)


# Function.apply without its look-out for torch.func, in which no call comes here (checks.plain).
apply = super(torch.autograd.Function, Fused).apply


def _gradients(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    plan, save, biases, versions, places = ctx.call
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
    layers = len(biases)
    x, weights, kept = saved[0], saved[1 : 1 + layers], saved[1 + layers :]
    if torch.compiler.is_compiling():
        return _traced(plan, x, weights, biases, needs, gy)
    differentiable = torch.is_grad_enabled()
    if differentiable or save == saving.INPUT:
        _check_unchanged(biases, versions)
    if differentiable or _stands_for_more(gy):
        return _by_pytorch(plan, x, weights, biases, needs, gy, differentiable)
    if gy.is_neg():
        gy = gy.resolve_neg()
    if places != [(t.data_ptr(), t.stride()) for t in saved]:
        # Hooks on saved tensors (offloading) may hand back copies that lie in memory in another way.
        kept = [plan.launchers.common.as_contiguous(t, t.shape[-1]) for t in kept]
        plan = plans.find(plan.op, plan.activation, x, weights, biases)
    elif x.dim() != 2:
        kept = [t if t.dim() == 2 else t.view(-1, t.shape[-1]) for t in kept]
    if plan.precision and plan.precision != plans.fp32_precision():
        # Products follow the setting of this moment; forward ran under another.
        plan = plans.find(plan.op, plan.activation, x, weights, biases)
    if plan.eager_reason is not None:
        return _by_pytorch(plan, x, weights, biases, needs, gy, differentiable)
    grads = OPERATIONS[plan.op].backward(plan, gy, x, weights, biases, kept, needs)
    if x.dim() == 2 or grads[0] is None:
        return grads  # type: ignore[no-any-return]
    return grads[0].view(x.shape), *grads[1:]


def _stands_for_more(gy: Tensor) -> bool:
    """A gradient that is more than its storage: of a subclass, or a batch of them (``is_grads_batched``)."""
    return (
        type(gy) is not Tensor
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(gy)
    )


def _check_unchanged(biases: Sequence[Tensor | None], versions: Sequence[int | None]) -> None:
    for bias, version in zip(biases, versions):
        if bias is not None and version is not None and bias._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"bias of shape {list(bias.shape)} is at version {bias._version}; expected version {version}"
            )


def _traced(
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    needs: Sequence[bool],
    gy: Tensor,
) -> tuple[Tensor | None, ...]:
    """Compiled autograd traces this backward: PyTorch's operations, which it can see into."""
    rows, gradient = x.reshape(-1, x.shape[-1]), gy.reshape(-1, gy.shape[-1])
    dx, *rest = OPERATIONS[plan.op].reference_grads(gradient, rows, weights, biases, plan.activation)
    return tuple(g if need else None for g, need in zip((dx.view(x.shape), *rest), needs))


def _by_pytorch(
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    needs: Sequence[bool],
    gy: Tensor,
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients by PyTorch's operations, with a graph of their own where they are to be differentiated again."""
    with torch.enable_grad():
        # Aliases: a path from one operand to another, or an operand that is passed twice, would count twice, since
        # these gradients are partial ones; and hooks of the operands would run twice.
        inputs = [None if t is None else t.view_as(t) for t in (x, *weights, *biases)]
        n = len(weights)
        y = OPERATIONS[plan.op].reference(inputs[0], inputs[1 : 1 + n], inputs[1 + n :], plan.activation)
        wanted = [t for t, need in zip(inputs, needs) if need and t is not None]
        grads = iter(torch.autograd.grad(y, wanted, gy, create_graph=create_graph))
    return tuple(next(grads) if need and t is not None else None for t, need in zip(inputs, needs))
