"""Launches of the backward of an activation, alone or under the GEMM above it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import Activation
from ..counters import barrier_counters
from ..kernels.act_backward import act_backward_pointer, act_backward_tma
from ..kernels.pointwise import act_grad as act_grad_kernel
from ..launch import Launch
from ..plan import Plan
from ..settings import Settings
from . import gluon, small
from .common import (
    ceil_div,
    launch_options,
    persistent_grid,
    pointwise_options,
    pointwise_rows,
    prepared,
    resident_grid,
    row_stride,
    rows_tile,
    scratch,
    sum_parts,
)


def _act_backward_launch(
    plan: Plan,
    settings: Settings,
    act: Activation,
    gy: Tensor,
    weight: Tensor,
    dpre: Tensor,
    store_a: bool,
    bias_grad: bool,
    out_bias_grad: bool,
) -> Launch:
    M, N = dpre.shape
    biases, tma = bias_grad or out_bias_grad, settings.family == "tma"
    tiles = ceil_div(M, settings.block_m) * ceil_div(N, settings.block_n)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    flags = (act.name, act.saves == "output", store_a, bias_grad, out_bias_grad, plan.fast_math)
    if settings.family == "gluon":
        return _act_backward_gluon_launch(
            plan, settings, tiles, act, gy, weight, dpre, store_a, bias_grad, out_bias_grad
        )
    options = launch_options(settings, cooperative=biases)
    if not tma:
        grid = resident_grid(plan, tiles) if biases else tiles
        return Launch(act_backward_pointer, grid, (*block, *flags, plan.dot_precision), **options)
    grid = resident_grid(plan, tiles) if biases else persistent_grid(plan, tiles, settings)
    out = rows_tile(dpre, settings.block_m, settings.block_n // settings.parts)
    tiles_of = {
        0: rows_tile(gy, settings.block_m, settings.block_k),
        1: rows_tile(weight, settings.block_k, settings.block_n),
        2: out,
        3: out,
    }
    if store_a:
        tiles_of[4] = out
    return Launch(act_backward_tma, grid, (*block, settings.parts, *flags, True), tiles_of, **options)


def _act_backward_gluon_launch(
    plan: Plan,
    settings: Settings,
    tiles: int,
    act: Activation,
    gy: Tensor,
    weight: Tensor,
    dpre: Tensor,
    store_a: bool,
    bias_grad: bool,
    out_bias_grad: bool,
) -> Launch:
    rows, columns = gluon.chunk(settings, bias_grad)
    chunk = rows_tile(dpre, rows, columns)
    tiles_of = {
        0: rows_tile(gy, settings.block_m, settings.block_k),
        1: rows_tile(weight, settings.block_k, settings.block_n),
        **dict.fromkeys((2, 4, 6), chunk),
    }
    flags = (act.name, act.saves == "output", store_a, bias_grad, out_bias_grad, plan.fast_math)
    cooperative = bias_grad or out_bias_grad
    return gluon.backward_launch(plan, settings, tiles, 1, tiles_of, flags, cooperative)


def act_backward(
    plan: Plan,
    name: str,
    gy: Tensor,
    weight: Tensor,
    saved: Tensor,
    act: Activation,
    store_a: bool,
    bias_grad: bool,
    out_bias_grad: bool,
    spent: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(dpre [M, N], a, db [N], db_out [K])`` of ``y = a W^T + b_out``, ``a = act(pre)``; None for what was not asked.

    gy: contiguous, aligned [M, K]. weight [K, N]. saved [M, N]: a or pre, whichever the activation keeps. ``spent``:
    a result may take the place of saved; the tile of a program is read before it is written, and no other program reads
    it.
    """
    settings = plan.settings[name]
    K, N = weight.shape
    M = gy.shape[0]
    if settings.family == "pair":
        da = gy @ weight
        dpre, a, db = act_grad(plan, name, da, saved, act, store_a, bias_grad, da, saved if spent else None)
        return dpre, a, db, gy.sum(0) if out_bias_grad else None
    if settings.family == "small":
        asked = (store_a, bias_grad, out_bias_grad, spent)
        dpre, a, db, _, db_out = small.hidden_backward(plan, name, act, gy, weight, saved, *asked)
        return dpre, a, db, db_out
    dpre = saved if spent else torch.empty_like(saved)
    a = torch.empty_like(saved) if store_a else None
    biases = bias_grad or out_bias_grad
    pre_sum = gy_sum = db = db_out = counters = None
    gy_parts = 0
    if biases:
        gy_parts = sum_parts(plan, K)
        part_rows = gluon.partial_rows(settings, M) if bias_grad else 0
        pre_sum, gy_sum = scratch(plan.device, (part_rows, N), (gy_parts if out_bias_grad else 0, K))
        counters = barrier_counters(plan.device)
    if bias_grad:
        db = gy.new_empty(N)
    if out_bias_grad:
        db_out = gy.new_empty(K)
    sums = (pre_sum, gy_sum, db, db_out, counters)
    tma = settings.family == "tma"

    key = (name, store_a, bias_grad, out_bias_grad)
    launch = plan.launches.get(key)
    if launch is None:
        launch = plan.launches[key] = _act_backward_launch(
            plan, settings, act, gy, weight, dpre, store_a, bias_grad, out_bias_grad
        )
    if tma:
        launch(plan.device_index, gy, weight, saved, dpre, a, gy, *sums, M, N, K, gy_parts)
    elif settings.family == "gluon":
        a_like = dpre if a is None else a
        ungated = (pre_sum, None, gy_sum, db, None, db_out, counters)
        launch(plan.device_index, gy, weight, saved, None, dpre, None, a_like, gy, *ungated, M, N, K, gy_parts)
    else:
        launch(plan.device_index, gy, weight, saved, dpre, a, *sums, M, N, K, row_stride(weight), gy_parts)
    return dpre, a, db, db_out


def act_grad(
    plan: Plan,
    name: str,
    gy: Tensor,
    saved: Tensor,
    act: Activation,
    store_a: bool,
    bias_grad: bool,
    dpre: Tensor | None = None,
    a: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(dpre [M, N], a, db [N])`` for ``a = act(pre)``; gy [M, N] with any strides, saved contiguous.

    ``dpre``, ``a``: contiguous, where to write them; each value of gy and saved is read before anything is written in
    its place.
    """
    M, N = saved.shape
    dpre = torch.empty_like(saved) if dpre is None else dpre
    a = None if not store_a else torch.empty_like(saved) if a is None else a
    rows, columns = pointwise_rows(plan), 128
    parts = sum_parts(plan, N) if bias_grad else ceil_div(M, rows)
    tasks = parts * ceil_div(N, columns)
    sums = db = counters = None
    if bias_grad:
        (sums,) = scratch(plan.device, (parts, N))
        db = gy.new_empty(N)
        counters = barrier_counters(plan.device)

    def make() -> Launch:
        grid = resident_grid(plan, tasks, 2) if bias_grad else tasks
        constants = (rows, columns, act.name, act.saves == "output", store_a, bias_grad, plan.fast_math)
        return Launch(act_grad_kernel, grid, constants, **pointwise_options(bias_grad))

    # gy comes from outside: its strides and alignment decide what Triton compiles, so they are in the key.
    key = ("act_grad", name, gy.stride(), gy.data_ptr() % 16, store_a, bias_grad)
    launch = prepared(plan, key, make)
    launch(
        plan.device_index,
        gy,
        saved,
        dpre,
        a,
        sums,
        db,
        counters,
        M,
        N,
        gy.stride(0),
        gy.stride(1),
        parts,
    )
    return dpre, a, db
