"""Launches of the gated backward to the hidden layer: dGate, dUp and the activation again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..counters import barrier_counters
from ..kernels.glu_backward import glu_backward_pointer, glu_backward_tma
from ..kernels.pointwise import glu_act_backward
from ..launch import Launch
from ..plan import Plan
from ..settings import Settings
from . import gluon, small
from .common import (
    ceil_div,
    half_tiles,
    launch_options,
    persistent_grid,
    pointwise_options,
    prepared,
    resident_grid,
    row_stride,
    rows_tile,
    scratch,
    sum_parts,
)


def _glu_backward_launch(
    plan: Plan,
    settings: Settings,
    gy: Tensor,
    down_weight: Tensor,
    h: Tensor | None,
    bias_grad: bool,
    down_bias_grad: bool,
) -> Launch:
    M, H, store_h, biases = gy.shape[0], down_weight.shape[1], h is not None, bias_grad or down_bias_grad
    tma = settings.family == "tma"
    tiles = ceil_div(M, settings.block_m) * ceil_div(H, settings.block_n)
    if settings.family == "gluon":
        return _glu_backward_gluon_launch(plan, settings, tiles, gy, down_weight, h, bias_grad, down_bias_grad)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    flags = (plan.activation.name, store_h, bias_grad, down_bias_grad, plan.fast_math)
    options = launch_options(settings, cooperative=biases)
    if not tma:
        grid = resident_grid(plan, tiles) if biases else tiles
        return Launch(glu_backward_pointer, grid, (*block, *flags, plan.dot_precision), **options)
    grid = resident_grid(plan, tiles) if biases else persistent_grid(plan, tiles, settings)
    gate_tile, up_tile = half_tiles(M, H, settings.block_m, settings.block_n // settings.parts)
    tiles_of = {
        0: rows_tile(gy, settings.block_m, settings.block_k),
        1: rows_tile(down_weight, settings.block_k, settings.block_n),
        2: gate_tile,
        3: up_tile,
        4: gate_tile,
        5: up_tile,
    }
    if h is not None:
        tiles_of[6] = rows_tile(h, settings.block_m, settings.block_n // settings.parts)
    return Launch(glu_backward_tma, grid, (*block, settings.parts, *flags, True), tiles_of, **options)


def _glu_backward_gluon_launch(
    plan: Plan,
    settings: Settings,
    tiles: int,
    gy: Tensor,
    down_weight: Tensor,
    h: Tensor | None,
    bias_grad: bool,
    down_bias_grad: bool,
) -> Launch:
    M, H = gy.shape[0], down_weight.shape[1]
    rows, columns = gluon.chunk(settings, bias_grad)
    gate_tile, up_tile = half_tiles(M, H, rows, columns)
    tiles_of = {
        0: rows_tile(gy, settings.block_m, settings.block_k),
        1: rows_tile(down_weight, settings.block_k, settings.block_n),
        2: gate_tile,
        3: up_tile,
        4: gate_tile,
        5: up_tile,
        # The kernel takes the chunk from h's descriptor, also where it stores none.
        6: gate_tile if h is None else rows_tile(h, rows, columns),
    }
    flags = (plan.activation.name, False, h is not None, bias_grad, down_bias_grad, plan.fast_math)
    cooperative = bias_grad or down_bias_grad
    return gluon.backward_launch(plan, settings, tiles, 2, tiles_of, flags, cooperative)


def glu_backward(
    plan: Plan,
    gy: Tensor,
    down_weight: Tensor,
    gate_up: Tensor,
    store_h: bool,
    bias_grad: bool,
    down_bias_grad: bool,
    spent: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(dgate_up [M, 2H], h, dbg [H], dbu [H], dbd [D_out])``, None for what was not asked for.

    gy: contiguous, aligned [M, D_out]. ``spent``: dgate_up takes gate_up's place; the tile of a program is read before
    it is written, and no other program reads it.
    """
    settings = plan.settings["backward"]
    D_out, H = down_weight.shape
    M = gy.shape[0]
    if settings.family == "pair":
        return _glu_backward_pair(plan, gy, down_weight, gate_up, store_h, bias_grad, down_bias_grad, spent)
    if settings.family == "small":
        asked = (store_h, bias_grad, down_bias_grad, spent)
        return small.hidden_backward(plan, "backward", plan.activation, gy, down_weight, gate_up, *asked)
    dgate_up = gate_up if spent else gy.new_empty(M, 2 * H)
    h = gy.new_empty(M, H) if store_h else None
    biases = bias_grad or down_bias_grad
    gate_sum = up_sum = gy_sum = dbg = dbu = dbd = counters = None
    gy_parts = 0
    if biases:
        gy_parts = sum_parts(plan, D_out)
        part_rows = gluon.partial_rows(settings, M) if bias_grad else 0
        gate_sum, up_sum, gy_sum = scratch(
            plan.device, (part_rows, H), (part_rows, H), (gy_parts if down_bias_grad else 0, D_out)
        )
        counters = barrier_counters(plan.device)
    if bias_grad:
        dbg, dbu = gy.new_empty(H), gy.new_empty(H)
    if down_bias_grad:
        dbd = gy.new_empty(D_out)
    sums = (gate_sum, up_sum, gy_sum, dbg, dbu, dbd, counters)

    key = ("backward", store_h, bias_grad, down_bias_grad)
    launch = plan.launches.get(key)
    if launch is None:
        launch = plan.launches[key] = _glu_backward_launch(
            plan, settings, gy, down_weight, h, bias_grad, down_bias_grad
        )
    if settings.family in ("tma", "gluon"):
        halves = (gate_up, gate_up, dgate_up, dgate_up)
        h_like = dgate_up if h is None and settings.family == "gluon" else h
        launch(plan.device_index, gy, down_weight, *halves, h_like, gy, *sums, M, H, D_out, gy_parts)
    else:
        launch(
            plan.device_index,
            gy,
            down_weight,
            gate_up,
            dgate_up,
            h,
            *sums,
            M,
            H,
            D_out,
            row_stride(down_weight),
            gy_parts,
        )
    return dgate_up, h, dbg, dbu, dbd


def _glu_backward_pair(
    plan: Plan,
    gy: Tensor,
    down_weight: Tensor,
    gate_up: Tensor,
    store_h: bool,
    bias_grad: bool,
    down_bias_grad: bool,
    spent: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    M, H = gy.shape[0], down_weight.shape[1]
    dh = gy @ down_weight
    dgate_up = gate_up if spent else torch.empty_like(gate_up)
    h = dh if store_h else None  # each value is read before h's is written there
    rows, columns = 16, 128
    parts = ceil_div(M, rows) if not bias_grad else sum_parts(plan, H)
    gate_sum = up_sum = dbg = dbu = counters = None
    if bias_grad:
        gate_sum, up_sum = scratch(plan.device, (parts, H), (parts, H))
        dbg, dbu = gy.new_empty(H), gy.new_empty(H)
        counters = barrier_counters(plan.device)
    tasks = parts * ceil_div(H, columns)

    def make() -> Launch:
        grid = resident_grid(plan, tasks, 2) if bias_grad else tasks
        constants = (rows, columns, plan.activation.name, store_h, bias_grad, plan.fast_math)
        return Launch(glu_act_backward, grid, constants, **pointwise_options(bias_grad))

    launch = prepared(plan, ("backward.pair", store_h, bias_grad), make)
    launch(plan.device_index, dh, gate_up, dgate_up, h, gate_sum, up_sum, dbg, dbu, counters, M, H, parts)
    return dgate_up, h, dbg, dbu, gy.sum(0) if down_bias_grad else None
