"""The gated MLP: two launches forward (gate, up and product; down), four backward (hidden; dX; dWgate/dWup; dWdown), or
three or two where the weights' gradients share a launch, with dX or without."""

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
    return ["gate_weight", "up_weight", "down_weight"], ["gate_bias", "up_bias", "down_bias"]


def check(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> None:
    gate, up, down = weights
    check_weight("gate_weight", gate)
    H, D = gate.shape
    check_weight("up_weight", up, H, D)
    check_weight("down_weight", down, None, H)
    check_input(x, D, "gate_weight", gate)
    for name, bias, width in zip(("gate_bias", "up_bias", "down_bias"), biases, (H, H, down.shape[0])):
        check_bias(name, bias, width)


def reference(x: Tensor, weights: Sequence[Tensor], biases: Biases, activation: Activation) -> Tensor:
    gate, up, down = weights
    gate_bias, up_bias, down_bias = biases
    return plain.glu_mlp(x, gate, up, down, gate_bias, up_bias, down_bias, activation)


reference_grads = plain.glu_mlp_grads


def keeps(needs: Sequence[bool]) -> int:
    if needs[3]:
        return saving.ACTIVATION
    return saving.HIDDEN if any(needs[:-1]) else saving.INPUT  # the down bias alone needs only the output's gradient


def spends(activation: Activation) -> bool:
    return True  # dGate and dUp take the place of gate and up


def forward(plan: Plan, x: Tensor, weights: Sequence[Tensor], biases: Biases, save: int) -> tuple[Tensor, list[Tensor]]:
    h, gate_up = plan.launchers.glu.glu_forward(plan, x, weights[0], weights[1], biases[0], biases[1], bool(save))
    assert h is not None
    y = plan.launchers.small.down(plan, h, weights[2], biases[2])
    if gate_up is None:
        return y, []
    return y, [gate_up, h] if save == saving.ACTIVATION else [gate_up]


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
    run, common = plan.launchers.glu, plan.launchers.common
    needs_x, needs_gate, needs_up, needs_down, needs_bg, needs_bu, needs_bd = needs
    gate, up, down = weights
    gy = common.as_contiguous(gy, down.shape[0])
    if not keeps(needs):
        return None, None, None, None, None, None, gy.sum(0)
    gate_up = saved[0] if saved else None
    kept = saved[1] if len(saved) > 1 else None
    if gate_up is None:
        _, gate_up = run.glu_forward(plan, x, gate, up, biases[0], biases[1], save=True, store_h=False)
        assert gate_up is not None
        spent = True
    dx = dwg = dwu = dwd = dbg = dbu = dbd = None
    if needs_x or needs_gate or needs_up or needs_bg or needs_bu:
        hidden = plan.launchers.glu_backward.glu_backward(
            plan, gy, down, gate_up, needs_down and kept is None, needs_bg or needs_bu, needs_bd, spent
        )
        dgate_up, made, dbg, dbu, dbd = hidden
        h = made if kept is None else kept
        grouped = plan.launchers.glu_grads.grouped(plan, needs_x, needs_gate and needs_up and needs_down)
        if grouped is not None:
            dx, dwgu, dwd = plan.launchers.glu_grads.glu_grads(plan, grouped, gy, h, dgate_up, x, gate, up)
            dwg, dwu = torch.unsafe_split(dwgu, gate.shape[0])
            if needs_x and dx is None:
                del hidden, made, h
                dx = run.dual_dgrad(plan, dgate_up, gate, up)
        else:
            if needs_down:
                assert h is not None
                dwd = common.weight_grad(plan, gy, h)  # first of the products: h is free before the others need room
            del hidden, made, h
            if needs_x:
                dx = run.dual_dgrad(plan, dgate_up, gate, up)
            dwg, dwu = _weight_grads(plan, dgate_up, x, gate, needs_gate, needs_up)
    else:
        dwd = common.weight_grad(plan, gy, run.glu_act(plan, gate_up) if kept is None else kept)
        dbd = gy.sum(0) if needs_bd else None
    return dx, dwg, dwu, dwd, dbg if needs_bg else None, dbu if needs_bu else None, dbd


def _weight_grads(
    plan: Plan, dgate_up: Tensor, x: Tensor, gate: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """One product for both; its halves are the two gradients."""
    if not needs_gate and not needs_up:
        return None, None
    H, common = gate.shape[0], plan.launchers.common
    if needs_gate and needs_up:
        # Nobody else sees the product, so its halves need not be views that know of it.
        dwg, dwu = torch.unsafe_split(common.weight_grad(plan, dgate_up, x), H)
        return dwg, dwu
    if needs_gate:
        return common.weight_grad(plan, dgate_up[:, :H], x), None
    return None, common.weight_grad(plan, dgate_up[:, H:], x)
