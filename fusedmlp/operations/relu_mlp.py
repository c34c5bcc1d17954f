"""A stack of Linear + ReLU. Each dX product applies the mask of the layer below and sums its bias gradient."""

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
    return [f"weights[{i}]" for i in range(layers)], [f"biases[{i}]" for i in range(layers)]


def check(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> None:
    width = None
    for i, (weight, bias) in enumerate(zip(weights, biases)):
        check_weight(f"weights[{i}]", weight, None, width)
        width = weight.shape[0]
        check_bias(f"biases[{i}]", bias, width)
    check_input(x, weights[0].shape[1], "weights[0]", weights[0])


def reference(x: Tensor, weights: Sequence[Tensor], biases: Biases, activation: Activation) -> Tensor:
    return plain.relu_mlp(x, weights, biases)


reference_grads = plain.relu_mlp_grads


def keeps(needs: Sequence[bool]) -> int:
    return saving.HIDDEN if any(needs) else saving.INPUT


def spends(activation: Activation) -> bool:
    return False  # a layer's output is the next one's input


def forward(plan: Plan, x: Tensor, weights: Sequence[Tensor], biases: Biases, save: int) -> tuple[Tensor, list[Tensor]]:
    """Backward needs the output of every layer, the last included."""
    outputs = plan.launchers.linear.relu_layers(plan, x, weights, biases, plan.activation)
    return outputs[-1], outputs if save else []


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
    layers = len(weights)
    act = plan.activation
    saved = saved or forward(plan, x, weights, biases, saving.HIDDEN)[1]
    needs_x, needs_weights, needs_biases = needs[0], needs[1 : 1 + layers], needs[1 + layers :]
    dweights: list[Tensor | None] = [None] * layers
    dbiases: list[Tensor | None] = [None] * layers
    lowest = 0 if needs_x else min(i for i in range(layers) if needs_weights[i] or needs_biases[i])
    last = layers - 1
    gy = gy.reshape(-1, weights[last].shape[0])
    g, _, dbiases[last] = run.act.act_grad(plan, "backward", gy, saved[last], act, False, needs_biases[last])
    for i in range(last, lowest - 1, -1):
        below = saved[i - 1] if i else run.common.as_rows(x, weights[0].shape[1], tma=False)
        if needs_weights[i]:
            dweights[i] = run.common.weight_grad(plan, g, below)
        if i > lowest:
            g, _, dbiases[i - 1], _ = run.act.act_backward(
                plan, f"backward.{i}", g, weights[i], below, act, False, needs_biases[i - 1], False
            )
    return torch.mm(g, weights[0]) if needs_x else None, *dweights, *dbiases
