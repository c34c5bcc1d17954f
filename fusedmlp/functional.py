"""The functional interface: stateless fused MLP operations.

Common to all of them:

* Tensors are float32, bfloat16 or float16 on one CUDA device for the kernels; anything else PyTorch can multiply
  (CPU tensors, float64) takes PyTorch's own operations, and :func:`fusedmlp.explain_plan` says why.
* All tensors of a call share dtype and device. Inside ``torch.autocast`` float32 tensors are cast as eager does.
* x may have any number of leading dimensions (its ``[..., K]`` stands for M = product of the leading ones, tokens)
  and any strides.
* Differentiable in every tensor argument; double backward works, through PyTorch's operations.
* float32 products follow ``torch.get_float32_matmul_precision()`` at the time of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import checks, saving, steady
from . import plan as plans
from .activations import Activation, resolve_activation
from .autograd import Call
from .autograd import apply as apply_fused
from .explain import note_eager, note_plan
from .operations import OPERATIONS


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | Activation = "relu") -> Tensor:
    """``act(x W^T + b)`` in one kernel.

    ======  ==================  ===========================================
    tensor  shape               meaning
    ======  ==================  ===========================================
    x       ``[..., K]``        input
    weight  ``[N, K]``          as in ``nn.Linear``
    bias    ``[N]`` or None     added before the activation
    result  ``[..., N]``        dtype of x
    ======  ==================  ===========================================

    Args:
        activation: one of ours or any Hugging Face name that means it, see :mod:`fusedmlp.activations`.

    Raises:
        ValueError: unknown activation.
        RuntimeError: shapes, dtypes or devices that do not fit together, integer or complex tensors.
    """
    return _call("linear_act", activation, x, (weight,), (bias,))


def glu_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | Activation = "silu",
    recompute: bool = False,
    keep_activation: bool = False,
) -> Tensor:
    """``(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd``: two launches forward, four backward.

    ===========  =====================  ===========================================
    tensor       shape                  meaning
    ===========  =====================  ===========================================
    x            ``[..., D]``           input
    gate_weight  ``[H, D]``             its product is activated
    up_weight    ``[H, D]``             its product multiplies the activated gate
    down_weight  ``[D_out, H]``         back to the model's width
    gate_bias    ``[H]`` or None
    up_bias      ``[H]`` or None
    down_bias    ``[D_out]`` or None
    result       ``[..., D_out]``       dtype of x
    ===========  =====================  ===========================================

    Args:
        activation: one of ours or any Hugging Face name that means it, see :mod:`fusedmlp.activations`.
        recompute: keep only x for backward and make gate and up again there (one more launch). Otherwise gate and
            up are kept, 2H values a token.
        keep_activation: keep act(gate) * up too, 3H values a token, where dWdown is needed. Backward then does not
            make and store it again: less time, most where D is small.

    Raises:
        ValueError: unknown activation, or both recompute and keep_activation.
        RuntimeError: shapes, dtypes or devices that do not fit together, integer or complex tensors.
    """
    weights, biases = (gate_weight, up_weight, down_weight), (gate_bias, up_bias, down_bias)
    return _call("glu_mlp", activation, x, weights, biases, saving.level(recompute, keep_activation))


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    activation: str | Activation = "gelu",
    recompute: bool = False,
) -> Tensor:
    """``act(x W1^T + b1) W2^T + b2``: two launches forward, four backward.

    ==========  =====================  ===========================================
    tensor      shape                  meaning
    ==========  =====================  ===========================================
    x           ``[..., D]``           input
    fc1_weight  ``[H, D]``
    fc2_weight  ``[D_out, H]``
    fc1_bias    ``[H]`` or None        added before the activation
    fc2_bias    ``[D_out]`` or None
    result      ``[..., D_out]``       dtype of x
    ==========  =====================  ===========================================

    Args:
        activation: one of ours or any Hugging Face name that means it, see :mod:`fusedmlp.activations`.
        recompute: keep only x for backward and make the hidden layer again there (one more launch). Otherwise H
            values a token are kept.

    Raises:
        ValueError: unknown activation.
        RuntimeError: shapes, dtypes or devices that do not fit together, integer or complex tensors.
    """
    return _call("mlp", activation, x, (fc1_weight, fc2_weight), (fc1_bias, fc2_bias), saving.level(recompute))


def relu_mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """A stack of Linear and ReLU, the last layer activated too; one launch forward where the stack is small.

    ==========  =======================  ===========================================
    tensor      shape                    meaning
    ==========  =======================  ===========================================
    x           ``[..., N_0]``           input
    weights[i]  ``[N_(i+1), N_i]``
    biases[i]   ``[N_(i+1)]`` or None    added before the ReLU
    result      ``[..., N_last]``        dtype of x
    ==========  =======================  ===========================================

    Raises:
        ValueError: no layer, or not as many biases as weights.
        RuntimeError: shapes, dtypes or devices that do not fit together, integer or complex tensors.
    """
    if not weights or len(weights) != len(biases):
        raise ValueError(
            f"got {len(weights)} weights and {len(biases)} biases; allowed: one weight or more, "
            f"and for each a bias or None"
        )
    return _call("relu_mlp", "relu", x, tuple(weights), tuple(biases))


def _call(
    op: str,
    activation: str | Activation,
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    save: int = saving.HIDDEN,
) -> Tensor:
    act = resolve_activation(activation)
    x, weights, biases = _autocast(x, weights, biases)
    table = None
    if torch.compiler.is_compiling():
        reason = checks.plain_while_compiling((x, *weights, *biases))
        if reason is None:
            return _traced(op, act, x, weights, biases, save)
    else:
        table = steady.table(op, act.name, save)
        if table is not None:
            y = table.call(x, *weights, *biases)
            if y is not None:
                return y  # type: ignore[no-any-return]
        reason = checks.plain((x, *weights, *biases))
    if reason is not None:
        return _eager(op, act, x, weights, biases, reason)
    try:
        plan = plans.find(op, act, x, weights, biases)
    except (AttributeError, RuntimeError):
        reason = checks.strange((x, *weights, *biases))
        if reason is not None:
            return _eager(op, act, x, weights, biases, reason)
        checks.check_call(OPERATIONS[op], x, weights, biases)  # says better what is wrong
        raise
    note_plan(plan, save, x, weights, biases)
    if plan.eager_reason is not None:
        return OPERATIONS[op].reference(x, weights, biases, act)  # type: ignore[no-any-return]
    return _fused(plan, table, x, weights, biases, save)


def _eager(
    op: str,
    act: Activation,
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    reason: str,
) -> Tensor:
    if not (isinstance(x, Tensor) and x.is_nested):  # whose shapes are PyTorch's to check
        checks.check_call(OPERATIONS[op], x, weights, biases)
    note_eager(op, reason)
    return OPERATIONS[op].reference(x, weights, biases, act)  # type: ignore[no-any-return]


def _fused(
    plan: plans.Plan,
    table: Any,
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    save: int,
) -> Tensor:
    """The long way of a call, which may write it down for ``table``: the calls after it are steady then."""
    recorded = torch.is_grad_enabled()
    operands = (x, *weights, *biases)
    needs = [t is not None and t.requires_grad for t in operands] if recorded else [False] * len(operands)
    differentiable = any(needs)
    if table is None and not differentiable:
        y, _ = OPERATIONS[plan.op].forward(plan, x, weights, biases, saving.INPUT)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
    call = Call(plan, save if differentiable else saving.INPUT, needs, biases)
    if table is None or not steady.ripe(plan, f"forward {needs}"):
        return apply_fused(call, *operands) if differentiable else call.run(*operands)[0]  # type: ignore[no-any-return]
    if differentiable:
        y = apply_fused(call.write_down(), *operands)
        if call.steady:
            steady.add(plan, table, partial(apply_fused, call), call.bound, operands)
        return y  # type: ignore[no-any-return]
    written = steady.write_down(plan, lambda: call.run(*operands), operands, single=True)
    if written is None:
        return call.run(*operands)[0]  # type: ignore[no-any-return]
    (y,), program, bound = written
    if program is not None:
        steady.add(plan, table, program, bound, operands)
    return y  # type: ignore[return-value]


def _traced(
    op: str,
    act: Activation,
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    save: int,
) -> Tensor:
    """Under torch.compile: our operator where kernels can run, else PyTorch's operations, which Inductor fuses."""
    operation = OPERATIONS[op]
    checks.check_call(operation, x, weights, biases)
    from . import ops

    if ops.traces_kernels(x):
        return ops.call(op, x, weights, biases, act, save)
    return operation.reference(x, weights, biases, act)  # type: ignore[no-any-return]


def _autocast(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Inside autocast, cast as it would for F.linear: every floating tensor of the device but float64."""
    if not isinstance(x, Tensor) or checks.no_autocast(x) or not checks.autocasting(x.device.type):
        return x, weights, biases
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(t: Tensor) -> Tensor:
        castable = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if castable and t.device.type == x.device.type else t

    return (
        cast(x),
        tuple([cast(w) for w in weights]),
        tuple([None if b is None else cast(b) for b in biases]),
    )
