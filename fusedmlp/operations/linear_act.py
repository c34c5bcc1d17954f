"""``y = act(x W^T + b)``: one launch forward; backward the activation with the bias gradient, then dX and dW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import reference as plain
from .. import saving
from ..activations import Activation
from ..checks import check_bias, check_input, check_weight

if TYPE_CHECKING:
    from ..plan import Plan

Biases = Sequence[Tensor | None]
Grads = tuple[Tensor | None, ...]


def names(layers: int) -> tuple[list[str], list[str]]:
    return ["weight"], ["bias"]


def check(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> None:
    (weight,), (bias,) = weights, biases
    check_weight("weight", weight)
    check_input(x, weight.shape[1], "weight", weight)
    check_bias("bias", bias, weight.shape[0])


def reference(x: Tensor, weights: Sequence[Tensor], biases: Biases, activation: Activation) -> Tensor:
    return plain.linear_act(x, weights[0], biases[0], activation)


reference_grads = plain.linear_act_grads


def keeps(needs: Sequence[bool]) -> int:
    return saving.HIDDEN if any(needs) else saving.INPUT


def spends(activation: Activation) -> bool:
    return activation.saves == "input"  # nobody else has the pre-activation


def forward(plan: Plan, x: Tensor, weights: Sequence[Tensor], biases: Biases, save: int) -> tuple[Tensor, list[Tensor]]:
    """Of the first weight and bias: for a two-layer MLP that is its hidden layer."""
    act = plan.activation
    y, pre = plan.launchers.linear.linear_act(
        plan, "forward", x, weights[0], biases[0], act, bool(save) and act.saves == "input"
    )
    if not save:
        return y, []
    return y, [y if pre is None or act.saves == "output" else pre]


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
    needs_x, needs_weight, needs_bias = needs
    (weight,) = weights
    (kept,) = saved or forward(plan, x, weights, biases, saving.HIDDEN)[1]
    gy = gy.reshape(-1, weight.shape[0])
    dpre, _, db = plan.launchers.act.act_grad(
        plan,
        "backward",
        gy,
        kept,
        plan.activation,
        store_a=False,
        bias_grad=needs_bias,
        dpre=kept if spends(plan.activation) and (spent or not saved) else None,
    )
    dx = torch.mm(dpre, weight) if needs_x else None
    dw = plan.launchers.common.weight_grad(plan, dpre, x) if needs_weight else None
    return dx, dw, db
