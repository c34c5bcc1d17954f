"""The two-layer MLP: two launches forward, four backward (hidden with both bias gradients; dX; dW1; dW2), or three or
two where the weights' gradients share a launch, with dX or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .. import reference as plain
from .. import saving
from ..activations import Activation
from ..checks import check_bias, check_input, check_weight
from . import linear_act

if TYPE_CHECKING:
    from ..plan import Plan

Biases = Sequence[Tensor | None]
Grads = tuple[Tensor | None, ...]


def names(layers: int) -> tuple[list[str], list[str]]:
    return ["fc1_weight", "fc2_weight"], ["fc1_bias", "fc2_bias"]


def check(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> None:
    fc1, fc2 = weights
    check_weight("fc1_weight", fc1)
    check_weight("fc2_weight", fc2, None, fc1.shape[0])
    check_input(x, fc1.shape[1], "fc1_weight", fc1)
    check_bias("fc1_bias", biases[0], fc1.shape[0])
    check_bias("fc2_bias", biases[1], fc2.shape[0])


def reference(x: Tensor, weights: Sequence[Tensor], biases: Biases, activation: Activation) -> Tensor:
    return plain.mlp(x, weights[0], weights[1], biases[0], biases[1], activation)


reference_grads = plain.mlp_grads


def keeps(needs: Sequence[bool]) -> int:
    return saving.HIDDEN if any(needs[:-1]) else saving.INPUT  # fc2's bias alone needs only the output's gradient


spends = linear_act.spends


def forward(plan: Plan, x: Tensor, weights: Sequence[Tensor], biases: Biases, save: int) -> tuple[Tensor, list[Tensor]]:
    a, saved = linear_act.forward(plan, x, weights, biases, save)
    return plan.launchers.small.down(plan, a, weights[1], biases[1]), saved


def backward(
    plan: Plan,
    gy: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    spent: bool = False,
) -> Grads:
    run = plan.launchers
    needs_x, needs_w1, needs_w2, needs_b1, needs_b2 = needs
    fc1, fc2 = weights
    act = plan.activation
    gy = run.common.as_contiguous(gy, fc2.shape[0])
    if not keeps(needs):
        return None, None, None, None, gy.sum(0)
    (kept,) = saved or linear_act.forward(plan, x, weights, biases, saving.HIDDEN)[1]
    spent = spends(act) and (spent or not saved)
    a = kept if act.saves == "output" else None
    dx = dw1 = dw2 = db1 = db2 = None
    if needs_x or needs_w1 or needs_b1:
        remake = needs_w2 and a is None
        dpre, made, db1, db2 = run.act.act_backward(
            plan, "backward", gy, fc2, kept, act, remake, needs_b1, needs_b2, spent
        )
        hidden = made if a is None else a
        del made
        grouped = run.glu_grads.grouped(plan, needs_x, needs_w1 and needs_w2)
        if grouped is not None:
            assert hidden is not None
            dx, dw1, dw2 = run.glu_grads.glu_grads(plan, grouped, gy, hidden, dpre, x, fc1, fc1)
            del hidden, kept, a
            if needs_x and dx is None:
                dx = run.small.dgrad(plan, dpre, fc1)
            return dx, dw1, dw2, db1, db2
        if needs_w2:
            assert hidden is not None
            # First of the products: the hidden layer is free before the others need room.
            dw2 = run.common.weight_grad(plan, gy, hidden)
        del hidden, kept, a
        dx = run.small.dgrad(plan, dpre, fc1) if needs_x else None
        dw1 = run.common.weight_grad(plan, dpre, x) if needs_w1 else None
    else:
        dw2 = run.common.weight_grad(plan, gy, run.linear.activate(plan, kept, act) if a is None else a)
        db2 = gy.sum(0) if needs_b2 else None
    return dx, dw1, dw2, db1, db2
