"""Launches for small batches (:mod:`fusedmlp.kernels.small_batch`, :mod:`fusedmlp.kernels.small_backward`), and the
choice between them and cuBLAS for the last product."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import Activation
from ..counters import barrier_counters
from ..kernels.small_backward import dual_dgrad_small, hidden_backward_small
from ..kernels.small_batch import glu_small, linear_small
from ..launch import Launch
from ..plan import Plan
from ..settings import Settings
from ..settings.device import info
from .common import as_rows, ceil_div, launch_options, linear, prepared, row_stride


def tiles_of(settings: Settings, M: int, N: int) -> int:
    """Output tiles [block_m, block_n]; one row of them where block_m holds all tokens."""
    return ceil_div(M, settings.block_m) * ceil_div(N, settings.block_n)


def overlaps(plan: Plan) -> bool:
    """Whether a launch may begin before the one ahead of it has ended (programmatic dependent launch, from 9.0 on)."""
    return plan.device_index is not None and info(plan.device).capability >= (9, 0)


def triggers(plan: Plan, name: str) -> bool:
    """Whether a launch of this name is the one ahead of a last product that may begin before it has ended."""
    down = plan.settings.get("down")
    return name == "forward" and down is not None and down.family == "small" and overlaps(plan)


def glu_small_launch(plan: Plan, settings: Settings, M: int, H: int, flags: tuple[bool, bool, bool, bool]) -> Launch:
    """Of ``flags`` (gate bias, up bias, save gate and up, store h); called as the pointer kernel is."""
    block = (settings.block_m, settings.block_n, settings.block_k)
    precision, trigger = plan.dot_precision, triggers(plan, "forward")
    constants = (*block, plan.activation.name, *flags, plan.fast_math, precision, trigger)
    return Launch(glu_small, tiles_of(settings, M, H), constants, **launch_options(settings))


def _for_splits(plan: Plan, parts: int, launch: Launch, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Partial sums [parts, M, N] of the programs that share the sum behind a tile, and a counter for each tile."""
    if parts == 1:
        return None, None
    partial = like.new_empty((parts, *launch.numbers[:2]), dtype=torch.float32)
    return partial, barrier_counters(plan.device, launch.grid // parts)


def linear_act_small(
    plan: Plan,
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "identity",
    save_pre: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``(act(x W^T + b), x W^T + b or None)``, both [M, N], in one launch; ``parts`` of the settings share K."""
    x = as_rows(x, weight.shape[1], tma=False)
    launch = plan.launches.get((name, activation, save_pre))
    if launch is None:
        launch = _linear_small_launch(plan, name, x, weight, bias is not None, activation, save_pre)
        plan.launches[(name, activation, save_pre)] = launch
    y = x.new_empty(*launch.numbers[:2])
    pre = torch.empty_like(y) if save_pre else None
    partial, counters = _for_splits(plan, plan.settings[name].parts, launch, x)
    launch(plan.device_index, x, weight, bias, y, pre, partial, counters, *launch.numbers)
    return y, pre


def _linear_small_launch(
    plan: Plan, name: str, x: Tensor, weight: Tensor, bias: bool, activation: str, save_pre: bool
) -> Launch:
    settings, M, (N, K) = plan.settings[name], x.shape[0], weight.shape
    block = (settings.block_m, settings.block_n, settings.block_k, settings.parts)
    dependent = name == "down" and overlaps(plan)
    flags = (activation, bias, save_pre, plan.fast_math, plan.dot_precision)
    constants = (*block, *flags, dependent, triggers(plan, name))
    options = launch_options(settings) | ({"launch_pdl": True} if dependent else {})
    launch = Launch(linear_small, settings.parts * tiles_of(settings, M, N), constants, **options)
    return launch.of(M, N, K, row_stride(x), row_stride(weight))


def down(plan: Plan, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The last product of an MLP [M, D_out]; h: contiguous [M, H]."""
    if plan.settings["down"].family != "small":
        return linear(h, weight, bias)
    return linear_act_small(plan, "down", h, weight, bias)[0]


def hidden_backward(
    plan: Plan,
    name: str,
    act: Activation,
    gy: Tensor,
    weight: Tensor,
    saved: Tensor,
    store_h: bool,
    bias_grad: bool,
    out_bias_grad: bool,
    spent: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(gradient of saved, h [M, N], db [N], dbu [N], dby [K])`` in one launch, None for what was not asked for or is
    not there.

    gy: contiguous [M, K]. weight [K, N]. saved: gate and up [M, 2N], or [M, N] of one layer; ``spent``: its gradient
    takes its place.
    """
    settings = plan.settings[name]
    K, N = weight.shape
    M = gy.shape[0]
    gated = plan.op == "glu_mlp"
    grad = saved if spent else torch.empty_like(saved)
    h = gy.new_empty(M, N) if store_h else None
    db = gy.new_empty(N) if bias_grad else None
    dbu = gy.new_empty(N) if bias_grad and gated else None
    dby = gy.new_empty(K) if out_bias_grad else None

    def make() -> Launch:
        block = (settings.block_m, settings.block_n, settings.block_k)
        flags = (gated, act.name, act.saves == "output", store_h, bias_grad, out_bias_grad)
        programs = ceil_div(N, settings.block_n) + (ceil_div(K, 128) if out_bias_grad else 0)
        constants = (*block, *flags, plan.fast_math, plan.dot_precision)
        launch = Launch(hidden_backward_small, programs, constants, **launch_options(settings))
        return launch.of(M, N, K, row_stride(weight))

    launch = prepared(plan, (name, "small", store_h, bias_grad, out_bias_grad), make)
    launch(plan.device_index, gy, weight, saved, grad, h, db, dbu, dby, *launch.numbers)
    return grad, h, db, dbu, dby


def dgrad(plan: Plan, dpre: Tensor, weight: Tensor) -> Tensor:
    """dX [M, D] of two layers; dpre: contiguous [M, H]."""
    if plan.settings["dgrad"].family != "small":
        return torch.mm(dpre, weight)
    return dual_dgrad(plan, dpre, weight, None)


def dual_dgrad(plan: Plan, dgate_up: Tensor, gate_weight: Tensor, up_weight: Tensor | None) -> Tensor:
    """``dX [M, D] = dGate Wg + dUp Wu`` in one launch; dgate_up [M, 2H] contiguous. Without up: dGate [M, H] alone."""
    settings = plan.settings["dgrad"]
    H, D = gate_weight.shape
    M = dgate_up.shape[0]
    dx = dgate_up.new_empty(M, D)

    def make() -> Launch:
        block = (settings.block_m, settings.block_n, settings.block_k, settings.parts)
        programs = settings.parts * tiles_of(settings, M, D)
        launch = Launch(dual_dgrad_small, programs, (*block, plan.dot_precision), **launch_options(settings))
        return launch.of(M, D, H, row_stride(gate_weight), 0 if up_weight is None else row_stride(up_weight))

    launch = prepared(plan, ("dgrad", "small"), make)
    partial, counters = _for_splits(plan, settings.parts, launch, dgate_up)
    launch(plan.device_index, dgate_up, gate_weight, up_weight, dx, partial, counters, *launch.numbers)
    return dx
