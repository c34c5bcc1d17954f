"""The operations as ``torch.library`` operators, for torch.compile and export: ``torch.ops.fusedmlp.*``, or the
namespace of a Hub build (:mod:`fusedmlp._ops`).

Of each operation a forward ``op(x, weights, biases, has_bias, activation, save) -> [y, *kept]`` and a backward
``op_backward(gy, x, weights, biases, has_bias, kept, activation, needs) -> gradients asked for``. ``biases`` holds
those that exist; ``save`` is a level of :mod:`fusedmlp.saving`, ``kept`` what backward needs beyond inputs and y. What
the kernels cannot serve is only known at run time for symbolic sizes: the operators then compute by PyTorch's
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import plan as plans
from . import saving
from ._ops import add_op_namespace_prefix, ops
from .activations import Activation, resolve_activation
from .operations import OPERATIONS

_FORWARD = "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, str activation, int save) -> Tensor[]"
_BACKWARD = (
    "(Tensor gy, Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, Tensor[] kept, str activation, "
    "bool[] needs) -> Tensor[]"
)


def traces_kernels(x: Tensor) -> bool:
    """Whether a traced call goes to our operators, rather than to PyTorch's operations for Inductor to fuse."""
    if x.dtype not in plans.KERNEL_DTYPES:
        return False
    return x.device.type == "cuda" or (x.device.type == "cpu" and plans.interpreting())


def call(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: Activation,
    save: int,
) -> Tensor:
    """One traced call of an operation, already checked; ``save``: the level of :mod:`fusedmlp.saving` asked for."""
    present = [b for b in biases if b is not None]
    has_bias = [b is not None for b in biases]
    if torch.is_grad_enabled():
        needs = [t is not None and t.requires_grad for t in (x, *weights, *biases)]
        save = min(save, OPERATIONS[op].keeps(needs))
    else:
        save = saving.INPUT
    outputs = getattr(ops, op)(x, list(weights), present, has_bias, activation.name, save)
    return outputs[0]  # type: ignore[no-any-return]


def _spread(biases: Sequence[Tensor], has_bias: Sequence[bool]) -> list[Tensor | None]:
    given = iter(biases)
    return [next(given) if has else None for has in has_bias]


def _kept_widths(op: str, weights: Sequence[Tensor], activation: str, save: int) -> list[Any]:
    """Widths of the tensors [M, width] that forward returns beside y."""
    if not save:
        return []
    if op == "linear_act":
        return [weights[0].shape[0]] if resolve_activation(activation).saves == "input" else []
    if op == "glu_mlp":
        H = weights[0].shape[0]
        return [2 * H, H] if save == saving.ACTIVATION else [2 * H]
    return [w.shape[0] for w in weights[:-1]]


def _tokens(x: Tensor) -> Any:
    tokens: Any = 1
    for size in x.shape[:-1]:
        tokens = tokens * size
    return tokens


def _run_forward(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    activation: str,
    save: int,
) -> list[Tensor]:
    act = resolve_activation(activation)
    all_biases = _spread(biases, has_bias)
    plan = plans.find(op, act, x, weights, all_biases)
    if plan.eager_reason is not None:
        y = OPERATIONS[op].reference(x, weights, all_biases, act)
        # Backward goes PyTorch's way too and does not look at these.
        kept = [x.new_zeros(_tokens(x), width) for width in _kept_widths(op, weights, activation, save)]
        return [y.clone() if y is x else y, *kept]
    y, saved = OPERATIONS[op].forward(plan, x, weights, all_biases, save)
    # An alias, not a view: users may change the result in place.
    return [torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])), *[t for t in saved if t is not y]]


def _fake_forward(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    activation: str,
    save: int,
) -> list[Tensor]:
    y = x.new_empty(*x.shape[:-1], weights[-1].shape[0])
    tokens = _tokens(x)
    return [y, *[x.new_empty(tokens, width) for width in _kept_widths(op, weights, activation, save)]]


def _run_backward(
    op: str,
    gy: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    kept: Sequence[Tensor],
    activation: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    act = resolve_activation(activation)
    all_biases = _spread(biases, has_bias)
    if op == "linear_act" and x.dtype == torch.float32:
        kept = []  # zeros where forward went PyTorch's way, under a precision that may have changed since
    plan = plans.find(op, act, x, weights, all_biases)
    if plan.eager_reason is not None:
        flat_gy, flat_x = gy.reshape(_tokens(x), gy.shape[-1]), x.reshape(_tokens(x), x.shape[-1])
        dx, *rest = OPERATIONS[op].reference_grads(flat_gy, flat_x, weights, all_biases, act)
        grads = [dx.view(x.shape), *rest]
    else:
        rows = [t.reshape(-1, t.shape[-1]) for t in kept]
        if gy.is_neg():
            gy = gy.resolve_neg()
        dx, *rest = OPERATIONS[op].backward(plan, gy, x, weights, all_biases, rows, needs)
        grads = [None if dx is None else dx.view(x.shape), *rest]
    wanted = [g for g, need in zip(grads, needs) if need and g is not None]
    # Operators must not return tensors that share memory, as the two halves of one weight product do.
    owners: set[int] = set()
    for i, g in enumerate(wanted):
        if g.untyped_storage().data_ptr() in owners and g.numel():
            wanted[i] = g.clone()
        owners.add(g.untyped_storage().data_ptr())
    return wanted


def _fake_backward(
    op: str,
    gy: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    kept: Sequence[Tensor],
    activation: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    operands = (x, *weights, *_spread(biases, has_bias))
    return [t.new_empty(t.shape) for t, need in zip(operands, needs) if t is not None and need]


def _setup_context(op: str, ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, biases, has_bias, activation, save = inputs
    y, *kept = output
    if save and _keeps_output(op, activation):
        kept = [*kept, y]
    ctx.save_for_backward(x, *weights, *biases, *kept)
    ctx.counts = (len(weights), len(biases), len(kept))
    ctx.has_bias, ctx.activation = has_bias, activation
    ctx.set_materialize_grads(False)


def _keeps_output(op: str, activation: str) -> bool:
    """Whether y itself is among what backward needs."""
    return op == "relu_mlp" or (op == "linear_act" and resolve_activation(activation).saves == "output")


def _autograd_backward(op: str, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    layers, present, extra = ctx.counts
    x, *saved = ctx.saved_tensors
    weights, biases = saved[:layers], saved[layers : layers + present]
    kept = saved[layers + present :]
    needs_x, needs_weights, needs_biases, *_ = ctx.needs_input_grad
    gy = grads[0]
    if gy is None:
        return None, [None] * layers, [None] * present, None, None, None
    needs = [needs_x, *needs_weights, *[bool(need) for need in _spread_flags(needs_biases, ctx.has_bias)]]
    backward = getattr(ops, f"{op}_backward")
    found = iter(backward(gy, x, weights, biases, ctx.has_bias, kept, ctx.activation, needs))
    dx = next(found) if needs_x else None
    dweights = [next(found) if need else None for need in needs_weights]
    dbiases = [next(found) if need else None for need in needs_biases]
    return dx, dweights, dbiases, None, None, None


def _spread_flags(flags: Sequence[bool], has_bias: Sequence[bool]) -> list[bool]:
    given = iter(flags)
    return [has and next(given) for has in has_bias]


def _register(op: str) -> None:
    name, back = add_op_namespace_prefix(op), add_op_namespace_prefix(f"{op}_backward")
    forward = torch.library.custom_op(name, partial(_run_forward, op), mutates_args=(), schema=_FORWARD)
    forward.register_fake(partial(_fake_forward, op))
    forward.register_autograd(partial(_autograd_backward, op), setup_context=partial(_setup_context, op))
    backward = torch.library.custom_op(back, partial(_run_backward, op), mutates_args=(), schema=_BACKWARD)
    backward.register_fake(partial(_fake_backward, op))


for _op in OPERATIONS:
    _register(_op)
