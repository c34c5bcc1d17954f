"""Launches of :mod:`fusedmlp.kernels.linear_act` and of the ReLU stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation
from ..counters import barrier_counters
from ..kernels.linear_act import linear_act_pointer, linear_act_tma
from ..kernels.pointwise import act_forward
from ..kernels.relu_stack import relu_stack
from ..launch import Launch
from ..plan import Plan
from ..settings import Settings
from . import gluon
from .common import (
    as_rows,
    ceil_div,
    launch_options,
    persistent_grid,
    prepared,
    resident_grid,
    row_stride,
    rows_tile,
)
from .small import linear_act_small


def _linear_act_launch(
    plan: Plan,
    settings: Settings,
    act: Activation,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    save_pre: bool,
) -> Launch:
    M, N, tma = x.shape[0], weight.shape[0], settings.family == "tma"
    tiles = ceil_div(M, settings.block_m) * ceil_div(N, settings.block_n)
    flags = (act.name, bias is not None, save_pre, plan.fast_math)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    options = launch_options(settings)
    if settings.family == "gluon":
        return _linear_act_gluon_launch(plan, settings, tiles, act, x, weight, y, save_pre)
    if not tma:
        return Launch(linear_act_pointer, tiles, (*block, *flags, plan.dot_precision), **options)
    out = rows_tile(y, settings.block_m, settings.block_n // settings.parts)
    tiles_of = {
        0: rows_tile(x, settings.block_m, settings.block_k),
        1: rows_tile(weight, settings.block_n, settings.block_k),
        3: out,
    }
    if save_pre:
        tiles_of[4] = out
    grid = persistent_grid(plan, tiles, settings)
    return Launch(linear_act_tma, grid, (*block, settings.parts, *flags, True), tiles_of, **options)


def _linear_act_gluon_launch(
    plan: Plan, settings: Settings, tiles: int, act: Activation, x: Tensor, weight: Tensor, y: Tensor, save_pre: bool
) -> Launch:
    out = rows_tile(y, settings.block_m, settings.block_n // settings.parts)
    tiles_of = {
        0: rows_tile(x, settings.block_m, settings.block_k),
        1: rows_tile(weight, settings.block_n, settings.block_k),
        5: out,
    }
    if save_pre:
        tiles_of[6] = out
    flags = (act.name, save_pre, True, plan.fast_math)
    return gluon.forward_launch(plan, settings, tiles, 1, tiles_of, flags)


def linear_act(
    plan: Plan, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """``(act(x W^T + b), x W^T + b or None)``; x of any rank with last dimension K, results [M, N]."""
    settings = plan.settings[name]
    N, K = weight.shape
    if settings.family == "small":
        return linear_act_small(plan, name, x, weight, bias, act.name, save_pre)
    tma, warp_specialised = settings.family == "tma", settings.family == "gluon"
    if not plan.rows or name != "forward":
        x = as_rows(x, K, tma or warp_specialised)
    M = x.shape[0]
    if settings.family == "pair":
        if bias is not None and plan.by_cublas(name):
            return torch._addmm_activation(bias, x, weight.t()), None
        return _pair(plan, x, weight, bias, act, save_pre)
    y = x.new_empty(M, N)
    pre = torch.empty_like(y) if save_pre else None

    key = (name, save_pre)
    launch = plan.launches.get(key)
    if launch is None:
        launch = plan.launches[key] = _linear_act_launch(plan, settings, act, x, weight, bias, y, save_pre)
    if tma:
        launch(plan.device_index, x, weight, bias, y, pre, M, N, K)
    elif warp_specialised:
        launch(plan.device_index, x, weight, None, bias, None, y, pre, None, M, N, K)
    else:
        launch(plan.device_index, x, weight, bias, y, pre, M, N, K, row_stride(x), row_stride(weight))
    return y, pre


def _pair(
    plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    pre = F.linear(x, weight, bias)
    if act.name == "identity":
        return pre, pre
    y = activate(plan, pre, act, None if save_pre else pre)
    return y, pre if save_pre else None


def activate(plan: Plan, pre: Tensor, act: Activation, out: Tensor | None = None) -> Tensor:
    """``act(pre)``, pre contiguous; ``out``: where to write it, which may be pre."""
    y = torch.empty_like(pre) if out is None else out
    block = 2048
    launch = prepared(
        plan,
        ("act_forward", pre.numel()),
        lambda: Launch(act_forward, ceil_div(pre.numel(), block), (block, act.name, plan.fast_math), num_warps=8),
    )
    launch(plan.device_index, pre, y, pre.numel())
    return y


def relu_layers(
    plan: Plan, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: Activation
) -> list[Tensor]:
    """The output [M, N_i] of every layer, by one launch where the plan has one for the stack."""
    settings = plan.settings.get("stack")
    if settings is None:
        outputs = []
        for i, (weight, bias) in enumerate(zip(weights, biases)):
            x, _ = linear_act(plan, f"forward.{i}", x, weight, bias, act, save_pre=False)
            outputs.append(x)
        return outputs
    if not plan.rows:
        x = as_rows(x, plan.widths[0], tma=False)
    launch = plan.launches.get("stack")
    if launch is None:
        launch = plan.launches["stack"] = _stack_launch(plan, settings, biases)
    outputs = [x.new_empty(plan.M, width) for width in plan.widths[1:]]
    operands: list[Tensor | None] = []
    for layer in zip(weights, biases, outputs):
        operands += layer
    absent = 4 - len(outputs)
    numbers = (plan.M, *plan.widths, *[0] * absent, row_stride(x))
    launch(plan.device_index, x, *operands, *[None] * (3 * absent), barrier_counters(plan.device), *numbers)
    return outputs


def _stack_launch(plan: Plan, settings: Settings, biases: Sequence[Tensor | None]) -> Launch:
    most = ceil_div(plan.M, settings.block_m) * max(ceil_div(n, settings.block_n) for n in plan.widths[1:])
    has_bias = [b is not None for b in biases] + [False] * (4 - len(biases))
    block = (settings.block_m, settings.block_n, settings.block_k)
    constants = (len(biases), *block, *has_bias, plan.dot_precision)
    options = launch_options(settings, cooperative=True)
    return Launch(relu_stack, resident_grid(plan, most), constants, **options)
