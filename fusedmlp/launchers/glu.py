"""Launches of the gated kernels: forward, backward, and dX over the two weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.gemm import dual_dgrad_pointer, dual_dgrad_tma
from ..kernels.glu import glu_pointer, glu_tma
from ..kernels.glu_backward import glu_backward_pointer, glu_backward_tma
from ..kernels.pointwise import glu_act_backward, glu_act_forward
from ..launch import Launch, barrier_counters
from ..plan import Plan
from ..settings import Settings, calculate_settings
from .common import (
    as_rows,
    ceil_div,
    describe,
    describe_halves,
    describe_two,
    launch_options,
    persistent_grid,
    prepared,
    resident_grid,
    row_stride,
    scratch,
    sum_parts,
)


def _without_tma(plan: Plan, op: str, N: int, K: int) -> Settings:
    """Settings for weights that one descriptor cannot span."""
    key = ("without_tma", op)
    found = plan.launches.get(key)
    if found is None:
        found = plan.launches[key] = calculate_settings(
            op, plan.M, N, K, plan.dtype, plan.device, precision=plan.precision, tma=False
        )
    return found  # type: ignore[no-any-return]


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
    H, D = gate_weight.shape
    both = None
    if settings.family == "tma":
        both = describe_two(gate_weight, up_weight, [2, settings.block_n, settings.block_k])
        if both is None:
            settings = _without_tma(plan, "glu", H, D)
    x = as_rows(x, D, both is not None)
    M = x.shape[0]
    if settings.family == "pair":
        return _glu_pair(plan, x, gate_weight, up_weight, gate_bias, up_bias, save, store_h)
    h = x.new_empty(M, H) if store_h else None
    gate_up = x.new_empty(M, 2 * H) if save else None
    tiles = ceil_div(M, settings.block_m) * ceil_div(H, settings.block_n)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    flags = (plan.activation.name, gate_bias is not None, up_bias is not None, save, store_h)
    if both is not None:
        weights, up_first = both
        launch = prepared(
            plan,
            ("forward", save, store_h, up_first),
            lambda: Launch(
                glu_tma,
                persistent_grid(plan, tiles, settings),
                (*block, *flags, up_first, plan.fast_tanh, True),
                **launch_options(settings),
            ),
        )
        box = [settings.block_m, settings.block_n]
        launch(
            plan.device_index,
            describe(x, [settings.block_m, settings.block_k]),
            weights,
            gate_bias,
            up_bias,
            # The kernel takes its dtype from h's descriptor, also where it stores none.
            describe(h, box) if h is not None else describe(gate_up[:, :H], box),  # type: ignore[index]
            None if gate_up is None else describe(gate_up[:, :H], box),
            None if gate_up is None else describe(gate_up[:, H:], box),
            M,
            H,
            D,
        )
        return h, gate_up
    launch = prepared(
        plan,
        ("forward.pointer", save, store_h),
        lambda: Launch(
            glu_pointer,
            tiles,
            (*block, *flags, plan.fast_tanh, plan.precision or "ieee"),
            **launch_options(settings),
        ),
    )
    launch(
        plan.device_index,
        x,
        gate_weight,
        up_weight,
        gate_bias,
        up_bias,
        h,
        gate_up,
        M,
        H,
        D,
        row_stride(x),
        row_stride(gate_weight),
        row_stride(up_weight),
    )
    return h, gate_up


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


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
            (rows, columns, plan.activation.name, plan.fast_tanh),
            num_warps=4,
        ),
    )
    launch(plan.device_index, gate_up, h, M, H)
    return h


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


def glu_backward(
    plan: Plan,
    gy: Tensor,
    down_weight: Tensor,
    gate_up: Tensor,
    store_h: bool,
    bias_grad: bool,
    down_bias_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(dgate_up [M, 2H], h, dbg [H], dbu [H], dbd [D_out])``, None for what was not asked for.

    gy: contiguous, aligned [M, D_out].
    """
    settings = plan.settings["backward"]
    D_out, H = down_weight.shape
    M = gy.shape[0]
    if settings.family == "pair":
        return _glu_backward_pair(plan, gy, down_weight, gate_up, store_h, bias_grad, down_bias_grad)
    dgate_up = torch.empty_like(gate_up)
    h = gy.new_empty(M, H) if store_h else None
    tiles_m = ceil_div(M, settings.block_m)
    tiles = tiles_m * ceil_div(H, settings.block_n)
    biases = bias_grad or down_bias_grad
    gate_sum = up_sum = gy_sum = dbg = dbu = dbd = counters = None
    gy_parts = sum_parts(plan, D_out)
    if biases:
        part_rows = tiles_m if bias_grad else 0
        gate_sum, up_sum, gy_sum = scratch(
            plan.device, (part_rows, H), (part_rows, H), (gy_parts if down_bias_grad else 0, D_out)
        )
        counters = barrier_counters(plan.device)
    if bias_grad:
        dbg, dbu = gy.new_empty(H), gy.new_empty(H)
    if down_bias_grad:
        dbd = gy.new_empty(D_out)
    sums = (gate_sum, up_sum, gy_sum, dbg, dbu, dbd, counters)
    tma = settings.family == "tma"
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    flags = (plan.activation.name, store_h, bias_grad, down_bias_grad, plan.fast_tanh)

    def make() -> Launch:
        options = launch_options(settings, cooperative=biases)
        if tma:
            grid = resident_grid(plan, tiles) if biases else persistent_grid(plan, tiles, settings)
            return Launch(glu_backward_tma, grid, (*block, settings.parts, *flags, True), **options)
        grid = resident_grid(plan, tiles) if biases else tiles
        return Launch(glu_backward_pointer, grid, (*block, *flags, plan.precision or "ieee"), **options)

    launch = prepared(plan, ("backward", store_h, bias_grad, down_bias_grad), make)
    if tma:
        box = [settings.block_m, settings.block_n // settings.parts]
        launch(
            plan.device_index,
            describe(gy, [settings.block_m, settings.block_k]),
            describe(down_weight, [settings.block_k, settings.block_n]),
            describe(gate_up[:, :H], box),
            describe(gate_up[:, H:], box),
            describe(dgate_up[:, :H], box),
            describe(dgate_up[:, H:], box),
            None if h is None else describe(h, box),
            gy,
            *sums,
            M,
            H,
            D_out,
            gy_parts,
        )
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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    M, H = gy.shape[0], down_weight.shape[1]
    dh = gy @ down_weight
    dgate_up = torch.empty_like(gate_up)
    h = torch.empty_like(dh) if store_h else None
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
        constants = (rows, columns, plan.activation.name, store_h, bias_grad, plan.fast_tanh)
        options = {"launch_cooperative_grid": True} if bias_grad else {}
        return Launch(glu_act_backward, grid, constants, num_warps=8, **options)

    launch = prepared(plan, ("backward.pair", store_h, bias_grad), make)
    launch(plan.device_index, dh, gate_up, dgate_up, h, gate_sum, up_sum, dbg, dbu, counters, M, H, parts)
    return dgate_up, h, dbg, dbu, gy.sum(0) if down_bias_grad else None


def dual_dgrad(plan: Plan, dgate_up: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """``dX [M, D] = dGate Wg + dUp Wu``; dgate_up [M, 2H] contiguous."""
    settings = plan.settings["dgrad"]
    H, D = gate_weight.shape
    M = dgate_up.shape[0]
    both = None
    if settings.family == "tma":
        both = describe_two(gate_weight, up_weight, [1, settings.block_k, settings.block_n])
        if both is None:
            settings = _without_tma(plan, "dual_dgrad", D, H)
    if settings.family == "pair":
        return torch.addmm(dgate_up[:, :H] @ gate_weight, dgate_up[:, H:], up_weight)
    dx = dgate_up.new_empty(M, D)
    tiles = ceil_div(M, settings.block_m) * ceil_div(D, settings.block_n)
    block = (settings.block_m, settings.block_n, settings.block_k, settings.group)
    if both is not None:
        weights, up_first = both
        launch = prepared(
            plan,
            ("dgrad", up_first),
            lambda: Launch(
                dual_dgrad_tma,
                persistent_grid(plan, tiles, settings),
                (*block, settings.parts, up_first, True),
                **launch_options(settings),
            ),
        )
        halves = describe_halves(dgate_up, [1, settings.block_m, settings.block_k])
        box = [settings.block_m, settings.block_n // settings.parts]
        launch(plan.device_index, halves, weights, describe(dx, box), M, D, H)
        return dx
    launch = prepared(
        plan,
        "dgrad.pointer",
        lambda: Launch(dual_dgrad_pointer, tiles, (*block, plan.precision or "ieee"), **launch_options(settings)),
    )
    launch(
        plan.device_index,
        dgate_up,
        gate_weight,
        up_weight,
        dx,
        M,
        D,
        H,
        row_stride(gate_weight),
        row_stride(up_weight),
    )
    return dx
