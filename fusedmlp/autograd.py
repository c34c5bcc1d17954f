"""Autograd of the operations: what is kept for backward, what is made again.

Kept: the inputs themselves (weights cost nothing), and of the hidden layer 2H values a token for gated MLPs (3H with
``keep_activation``), H for two-layer ones, nothing of it with ``recompute``. Saved tensors are unpacked once. Nothing
of the user's is written in place; the hidden layer's gradient takes the place of what was kept to make it, unless the
graph is retained, hooks saw the kept tensor, or a CUDA graph, whose backward may be replayed alone, is being captured.
When a backward is itself differentiated (``create_graph=True``), the gradients come from the plain
PyTorch meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import plan as plans
from . import saving, steady
from .checks import any_autocast, autocasting
from .operations import OPERATIONS
from .plan import Plan


class Call:
    """How a differentiable call goes, the same for every call that looks alike.

    Attributes:
        plan, save: the plan, and the level of :mod:`fusedmlp.saving` that is asked for.
        layers: weights, and as many biases or Nones, among the operands.
        run: operands -> ``(result, *what is kept)``.
        bound, steady: whether ``run`` is a program, and one of the current stream's alone.
        spends: whether a last backward may write over the first tensor that is kept.
        tables: of backwards, by the gradients asked for and whether what is kept is spent; None where calls are not
            steady.
    """

    __slots__ = ("bound", "has_bias", "layers", "level", "plan", "run", "save", "spends", "steady", "tables")

    def __init__(self, plan: Plan, save: int, needs: Sequence[bool], biases: Sequence[Tensor | None]) -> None:
        self.plan, self.save, self.layers = plan, save, len(biases)
        self.level = plan.kept(save, needs)
        self.spends = self.level > saving.INPUT and OPERATIONS[plan.op].spends(plan.activation)
        self.has_bias = any(b is not None for b in biases)
        # Not a method: a call that refers to itself would wait for the garbage collector.
        self.run: Callable[..., Sequence[Any]] = partial(_by_launches, plan, self.layers, self.level)
        self.tables: dict[tuple[tuple[bool, ...], bool], Any] | None = None
        self.steady = self.bound = False

    def write_down(self) -> Call:
        """Let the next run be the one that makes the program of those after it."""
        self.run, self.tables = self._written_down, {}
        return self

    def _written_down(self, *operands: Tensor | None) -> Sequence[Any]:
        run: Callable[..., Sequence[Any]] = partial(_by_launches, self.plan, self.layers, self.level)
        written = steady.write_down(self.plan, partial(run, *operands), operands)
        if written is None or written[1] is None:
            self.run, self.tables = run, None  # of this call alone: nobody would look into them again
            return run(*operands) if written is None else written[0]
        found, program, self.bound = written
        self.steady, self.run = True, program.run
        return found

    def backwards(self, needs: tuple[bool, ...], spent: bool) -> Any:
        """The table of backwards for these gradients; None where calls are not steady."""
        if self.tables is None:
            return None
        found = self.tables.get((needs, spent))
        return self.tables.setdefault((needs, spent), steady.backward_table(self.plan.op)) if found is None else found


def _by_launches(plan: Plan, layers: int, level: int, x: Tensor, *operands: Tensor | None) -> tuple[Any, ...]:
    weights, biases = operands[:layers], operands[layers:]
    y, kept = OPERATIONS[plan.op].forward(plan, x, weights, biases, level)
    # An alias, not a view: users may change the result in place.
    out = y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))
    # An output is saved as what forward returns: autograd then keeps no reference from the graph to itself.
    return out, *[out if t is y else t for t in kept]


class Fused(torch.autograd.Function):
    """Any of the operations; operands are x, then all weights, then all biases."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *operands: Tensor | None) -> Tensor:
        out, *kept = call.run(x, *operands)
        saved = (x, *operands[: call.layers], *kept)
        ctx.save_for_backward(*saved)
        biases = operands[call.layers :]
        # Biases are no part of a backward, so users may change them before it, unless forward is to be run again.
        versions = [None if b is None or b.is_inference() else b._version for b in biases] if call.has_bias else ()
        places = None if call.steady else [(t.data_ptr(), t.stride()) for t in saved]  # type: ignore[union-attr]
        ctx.call = call, biases, versions, places, call.spends and saving.unseen()
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # once: hooks may unpack them
        if any_autocast():
            device_type = ctx.call[0].plan.device.type
            if autocasting(device_type):
                # Backward works in the dtypes that forward chose, whatever autocast says where it runs.
                with torch.autocast(device_type, enabled=False):
                    return _backward(ctx, saved, gy)
        return _backward(ctx, saved, gy)


# Function.apply without its look-out for torch.func, in which no call comes here (checks.plain).
apply = super(torch.autograd.Function, Fused).apply


def _backward(ctx: Any, saved: Sequence[Tensor], gy: Tensor) -> tuple[Tensor | None, ...]:
    if torch.compiler.is_compiling():
        return None, *_gradients(ctx, saved, gy, False)
    call, biases, versions, _, unseen = ctx.call
    spent = unseen and not saving.graph_is_kept()
    if call.tables is not None:
        table = call.tables.get((ctx.needs_input_grad, spent))
        if table is not None:
            if call.save == saving.INPUT:
                _check_unchanged(biases, versions)
            grads: Any = ()
            try:
                grads = table.call(gy, *saved, *biases)
            finally:
                if spent and grads is not None:
                    saving.mark_spent(saved[1 + call.layers])
            if grads is not None:
                return grads  # type: ignore[no-any-return]
    return None, *_gradients(ctx, saved, gy, spent)


def _gradients(ctx: Any, saved: Sequence[Tensor], gy: Tensor, spent: bool) -> tuple[Tensor | None, ...]:
    """By the long way, which may write itself down; ``spent``: the first tensor kept may be written over."""
    call, biases, versions, places, _ = ctx.call
    plan, needs = call.plan, ctx.needs_input_grad[1:]
    layers = call.layers
    x, weights, kept = saved[0], saved[1 : 1 + layers], saved[1 + layers :]
    if torch.compiler.is_compiling():
        return _traced(plan, x, weights, biases, needs, gy)
    differentiable = torch.is_grad_enabled()
    if differentiable or call.save == saving.INPUT:
        _check_unchanged(biases, versions)
    if differentiable or _stands_for_more(gy):
        return _by_pytorch(plan, x, weights, biases, needs, gy, differentiable)
    if gy.is_neg():
        gy = gy.resolve_neg()
    if places != [(t.data_ptr(), t.stride()) for t in saved]:
        # Hooks on saved tensors (offloading) may hand back copies that lie in memory in another way.
        plan = plans.find(plan.op, plan.activation, x, weights, biases)
    if plan.precision and plan.precision != plans.fp32_precision():
        # Products follow the setting of this moment; forward ran under another.
        plan = plans.find(plan.op, plan.activation, x, weights, biases)
    if plan.eager_reason is not None:
        return _by_pytorch(plan, x, weights, biases, needs, gy, differentiable)

    if spent and plan.capturing():
        spent = False

    def run(kept: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        rows = [plan.launchers.common.as_contiguous(t, t.shape[-1]) for t in kept]
        try:
            grads = OPERATIONS[plan.op].backward(plan, gy, x, weights, biases, rows, needs, spent)
        finally:
            if spent:
                saving.mark_spent(kept[0])
        if x.dim() == 2 or grads[0] is None:
            return grads  # type: ignore[no-any-return]
        return grads[0].view(x.shape), *grads[1:]

    table = call.backwards(ctx.needs_input_grad, spent)
    if table is not None and steady.ripe(plan, f"backward {needs} {spent}"):
        found = _written_down(plan, table, run, (gy, x, *weights), kept, biases, spent)
        if found is not None:
            return found
    return run(kept)


def _written_down(
    plan: Plan,
    table: Any,
    run: Callable[[Sequence[Tensor]], tuple[Tensor | None, ...]],
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    spent: bool,
) -> tuple[Tensor | None, ...] | None:
    """The gradients, by a run that makes the program of those after it; None where there was no room to write it down,
    and what is kept is as it was."""
    if spent:
        try:
            kept = (kept[0].clone(), *kept[1:])
        except torch.OutOfMemoryError:
            plan.attempts += 1
            return None
    inputs = (*operands, *kept, *biases)
    written = steady.write_down(plan, lambda: (None, *run(kept)), inputs)
    if written is None:
        return None
    (_, *found), program, bound = written
    if program is not None:
        steady.add(plan, table, program, bound or spent, inputs)  # neither serves inside a capture
    return tuple(found)


def _stands_for_more(gy: Tensor) -> bool:
    """A gradient that is more than its storage: of a subclass, or a batch of them (``is_grads_batched``)."""
    return (
        type(gy) is not Tensor
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(gy)
    )


def _check_unchanged(biases: Sequence[Tensor | None], versions: Sequence[int | None]) -> None:
    for bias, version in zip(biases, versions):  # no versions where there are no biases
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
