"""Launches of the gated kernels: forward, and dX over the two weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.gemm import dual_dgrad_pointer, dual_dgrad_tma
from ..kernels.glu import glu_pointer, glu_tma
from ..kernels.pointwise import glu_act_forward
from ..launch import Launch
from ..plan import Plan
from ..settings import Settings
from . import gluon, small
from .common import (
    as_rows,
    ceil_div,
    half_tiles,
    launch_options,
    pair_order,
    pair_tile,
    persistent_grid,
    prepared,
    row_stride,
    rows_tile,
    stacked_halves,
)


def _glu_launch(
    plan: Plan,
    settings: Settings,
    tma: bool,
    up_first: bool | None,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    h: Tensor | None,
    save: bool,
) -> Launch:
    M, H, store_h = x.shape[0], gate_weight.shape[0], h is not None
    tiles = ceil_div(M, settings.block_m) * ceil_div(H, settings.block_n)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    flags = (plan.activation.name, gate_bias is not None, up_bias is not None, save, store_h)
    options = launch_options(settings)
    if settings.family == "gluon":
        return _glu_gluon_launch(plan, settings, tiles, x, gate_weight, up_weight, h, save)
    if settings.family == "small":
        return small.glu_small_launch(plan, settings, M, H, flags[1:])
    if not tma:
        constants = (*block, *flags, plan.fast_math, plan.dot_precision)
        return Launch(glu_pointer, tiles, constants, **options)
    gate_tile, up_tile = half_tiles(M, H, settings.block_m, settings.block_n)
    tiles_of = {
        0: rows_tile(x, settings.block_m, settings.block_k),
        1: pair_tile(gate_weight, 2, settings.block_n, settings.block_k),
        # The kernel takes its dtype from h's descriptor, also where it stores none.
        4: gate_tile if h is None else rows_tile(h, settings.block_m, settings.block_n),
    }
    if save:
        tiles_of |= {5: gate_tile, 6: up_tile}
    grid = persistent_grid(plan, tiles, settings)
    return Launch(glu_tma, grid, (*block, *flags, up_first, plan.fast_math, True), tiles_of, **options)


def _glu_gluon_launch(
    plan: Plan,
    settings: Settings,
    tiles: int,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    h: Tensor | None,
    save: bool,
) -> Launch:
    M, H = x.shape[0], gate_weight.shape[0]
    columns = settings.block_n // settings.parts
    gate_tile, up_tile = half_tiles(M, H, settings.block_m, columns)
    tiles_of = {
        0: rows_tile(x, settings.block_m, settings.block_k),
        1: rows_tile(gate_weight, settings.block_n, settings.block_k),
        2: rows_tile(up_weight, settings.block_n, settings.block_k),
        # The kernel takes the columns of a store from h's descriptor, also where it stores none.
        5: gate_tile if h is None else rows_tile(h, settings.block_m, columns),
    }
    if save:
        tiles_of |= {6: gate_tile, 7: up_tile}
    flags = (plan.activation.name, save, h is not None, plan.fast_math)
    return gluon.forward_launch(plan, settings, tiles, 2, tiles_of, flags)


def glu_forward(
    plan: Plan,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    save: bool,
    store_h: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """``(h [M, H] or None, gate_up [M, 2H] or None)``; x of any rank with last dimension D."""
    settings = plan.settings["forward"]
    M, D, H = plan.M, plan.widths[0], plan.widths[1]
    tma, warp_specialised, up_first = settings.family == "tma", settings.family == "gluon", None
    if tma:
        up_first = pair_order(plan, gate_weight, up_weight)
        if up_first is None:
            settings, tma = plan.settings["forward.apart"], False
    if not plan.rows:
        x = as_rows(x, D, tma or warp_specialised)
    if settings.family == "pair":
        return _glu_pair(plan, x, gate_weight, up_weight, gate_bias, up_bias, save, store_h)
    h = x.new_empty(M, H) if store_h else None
    gate_up = x.new_empty(M, 2 * H) if save else None

    key = ("forward", tma, save, store_h, up_first)
    launch = plan.launches.get(key)
    if launch is None:
        strides = () if tma or warp_specialised else map(row_stride, (x, gate_weight, up_weight))
        launch = _glu_launch(plan, settings, tma, up_first, x, gate_weight, up_weight, gate_bias, up_bias, h, save)
        launch = plan.launches[key] = launch.of(M, H, D, *strides)
    numbers = launch.numbers
    if tma:
        weights = (gate_weight, up_weight)
        h_like = gate_up if h is None else h
        launch(plan.device_index, x, weights, gate_bias, up_bias, h_like, gate_up, gate_up, *numbers)
    elif warp_specialised:
        h_like = gate_up if h is None else h
        launch(plan.device_index, x, gate_weight, up_weight, gate_bias, up_bias, h_like, gate_up, gate_up, *numbers)
    else:
        launch(plan.device_index, x, gate_weight, up_weight, gate_bias, up_bias, h, gate_up, *numbers)
    return h, gate_up


def glu_act(plan: Plan, gate_up: Tensor) -> Tensor:
    """``h = act(gate) * up`` [M, H] of a contiguous gate_up [M, 2H]."""
    M, H = gate_up.shape[0], gate_up.shape[1] // 2
    h = gate_up.new_empty(M, H)
    rows, columns = 16, 128
    launch = prepared(
        plan,
        "glu_act_forward",
        lambda: Launch(
            glu_act_forward,
            ceil_div(M, rows) * ceil_div(H, columns),
            (rows, columns, plan.activation.name, plan.fast_math),
            num_warps=4,
        ),
    )
    launch(plan.device_index, gate_up, h, M, H)
    return h


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _glu_pair(
    plan: Plan,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    save: bool,
    store_h: bool,
) -> tuple[Tensor | None, Tensor | None]:
    M, H = x.shape[0], gate_weight.shape[0]
    gate_up = x.new_empty(M, 2 * H)
    _linear_into(gate_up[:, :H], x, gate_weight, gate_bias)
    _linear_into(gate_up[:, H:], x, up_weight, up_bias)
    h = glu_act(plan, gate_up) if store_h else None
    return h, gate_up if save else None


def _dual_dgrad_launch(
    plan: Plan, settings: Settings, tma: bool, up_first: bool | None, gate_weight: Tensor, dx: Tensor
) -> Launch:
    M, (H, D) = dx.shape[0], gate_weight.shape
    tiles = ceil_div(M, settings.block_m) * ceil_div(D, settings.block_n)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    options = launch_options(settings)
    if not tma:
        return Launch(dual_dgrad_pointer, tiles, (*block, plan.dot_precision), **options)
    tiles_of = {
        0: stacked_halves(M, H, settings.block_m, settings.block_k),
        1: pair_tile(gate_weight, 1, settings.block_k, settings.block_n),
        2: rows_tile(dx, settings.block_m, settings.block_n // settings.parts),
    }
    grid = persistent_grid(plan, tiles, settings)
    return Launch(dual_dgrad_tma, grid, (*block, settings.parts, up_first, True), tiles_of, **options)


def dual_dgrad(plan: Plan, dgate_up: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """``dX [M, D] = dGate Wg + dUp Wu``; dgate_up [M, 2H] contiguous."""
    settings = plan.settings["dgrad"]
    H, D = gate_weight.shape
    M = dgate_up.shape[0]
    if settings.family == "small":
        return small.dual_dgrad(plan, dgate_up, gate_weight, up_weight)
    tma = settings.family == "tma"
    up_first = pair_order(plan, gate_weight, up_weight) if tma else None
    if tma and up_first is None:
        settings, tma = plan.settings["dgrad.apart"], False
    if settings.family == "pair":
        return torch.addmm(dgate_up[:, :H] @ gate_weight, dgate_up[:, H:], up_weight)
    dx = dgate_up.new_empty(M, D)

    key = ("dgrad", tma, up_first)
    launch = plan.launches.get(key)
    if launch is None:
        launch = plan.launches[key] = _dual_dgrad_launch(plan, settings, tma, up_first, gate_weight, dx)
    if tma:
        launch(plan.device_index, dgate_up, (gate_weight, up_weight), dx, M, D, H)
    else:
        strides = (row_stride(gate_weight), row_stride(up_weight))
        launch(plan.device_index, dgate_up, gate_weight, up_weight, dx, M, D, H, *strides)
    return dx
