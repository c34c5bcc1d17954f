"""Launches of :mod:`fusedmlp.kernels.small_batch`, and the choice between it and cuBLAS for the last product."""

from __future__ import annotations

import torch
from torch import Tensor

from ..counters import barrier_counters
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


def glu_small_launch(plan: Plan, settings: Settings, M: int, H: int, flags: tuple[bool, bool, bool, bool]) -> Launch:
    """Of ``flags`` (gate bias, up bias, save gate and up, store h); called as the pointer kernel is."""
    block = (settings.block_m, settings.block_n, settings.block_k)
    trigger = overlaps(plan) and plan.settings["down"].family == "small"
    constants = (*block, plan.activation.name, *flags, plan.fast_math, plan.dot_precision, trigger)
    return Launch(glu_small, tiles_of(settings, M, H), constants, **launch_options(settings))


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
    settings = plan.settings[name]
    N, K = weight.shape
    x = as_rows(x, K, tma=False)
    M = x.shape[0]
    y = x.new_empty(M, N)
    pre = torch.empty_like(y) if save_pre else None
    partial = counters = None
    if settings.parts > 1:
        partial = x.new_empty((settings.parts, M, N), dtype=torch.float32)
        counters = barrier_counters(plan.device, tiles_of(settings, M, N))

    def make() -> Launch:
        block = (settings.block_m, settings.block_n, settings.block_k, settings.parts)
        dependent = overlaps(plan)
        constants = (*block, activation, bias is not None, save_pre, plan.fast_math, plan.dot_precision, dependent)
        options = launch_options(settings) | ({"launch_pdl": True} if dependent else {})
        return Launch(linear_small, settings.parts * tiles_of(settings, M, N), constants, **options)

    launch = prepared(plan, (name, activation, save_pre), make)
    strides = (row_stride(x), row_stride(weight))
    launch(plan.device_index, x, weight, bias, y, pre, partial, counters, M, N, K, *strides)
    return y, pre


def down(plan: Plan, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The last product of an MLP [M, D_out]; h: contiguous [M, H]."""
    if plan.settings["down"].family != "small":
        return linear(h, weight, bias)
    return linear_act_small(plan, "down", h, weight, bias)[0]
