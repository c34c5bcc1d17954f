"""The launch of the grouped products after a backward to the hidden layer: dWgate with dWup, dWdown, and dX where it
fits in; those of an MLP of two layers, whose hidden layer's halves stand for gate and up."""

from __future__ import annotations

from torch import Tensor

from ..launch import Launch, Tile
from ..plan import Plan
from ..settings import Settings
from . import gluon
from .common import as_rows, ceil_div, half_tiles, persistent_grid, row_stride, rows_tile


def grouped(plan: Plan, needs_x: bool, needs_weights: bool) -> str | None:
    """The name of the settings of a launch for several products; None where each has its own."""
    if not needs_weights:
        return None
    if needs_x and plan.settings["grads"].family == "gluon":
        return "grads"
    return "wgrads" if plan.settings["wgrads"].family == "gluon" else None


def _weight_tiles(gate_weight: Tensor, up_weight: Tensor, H: int, k: int, n: int) -> tuple[Tile, Tile]:
    """Of gate and up; of the upper and the lower half where one tensor is both."""
    if gate_weight.shape[0] == H:
        return rows_tile(gate_weight, k, n), rows_tile(up_weight, k, n)
    upper = rows_tile(gate_weight, k, n)._replace(shape=(H, gate_weight.shape[1]))
    return upper, upper._replace(offset=H * row_stride(gate_weight))


def _launch(
    plan: Plan,
    settings: Settings,
    gy: Tensor,
    h: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    dx: Tensor | None,
    dgate_up_weight: Tensor,
    ddown_weight: Tensor,
) -> Launch:
    from ..kernels.gluon.glu_grads import glu_grads_gluon

    M, D_out = gy.shape
    H, D = dgate_up_weight.shape[0] // 2, dgate_up_weight.shape[1]
    m, n, k = settings.block_m, settings.block_n, settings.block_k
    columns = n // settings.parts
    dgate_tile, dup_tile = half_tiles(M, H, m, k)
    dgate_t_tile, dup_t_tile = half_tiles(M, H, k, m)
    gate_tile, up_tile = _weight_tiles(gate_weight, up_weight, H, k, n)
    dgate_rows = rows_tile(dgate_up_weight[:H], m, columns)
    dup_rows = dgate_rows._replace(offset=H * D)
    tiles_of = {0: dgate_tile, 2: gate_tile, 4: dgate_t_tile}
    tiles_of |= {5: dup_t_tile, 6: rows_tile(x, k, n), 10: dgate_rows, 11: dup_rows}
    tiles_of |= {7: rows_tile(gy, k, m), 8: rows_tile(h, k, n), 12: rows_tile(ddown_weight, m, columns)}
    tiles = 2 * ceil_div(H, m) * ceil_div(D, n) + ceil_div(D_out, m) * ceil_div(h.shape[1], n)
    if dx is not None:
        tiles_of |= {1: dup_tile, 3: up_tile, 9: rows_tile(dx, m, columns)}
        tiles += ceil_div(M, m) * ceil_div(D, n)
    buffers = gluon.store_buffers(plan, settings, n, columns, 2)
    needs = (dx is not None, True, True)
    constants = (gluon.stages(settings), buffers, settings.group, columns, *needs)
    grid = persistent_grid(plan, tiles, settings)
    return Launch(glu_grads_gluon, grid, constants, tiles_of, num_warps=settings.warps)


def glu_grads(
    plan: Plan,
    name: str,
    gy: Tensor,
    h: Tensor,
    dgate_up: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """``(dX [M, D], dWgate above dWup [2H, D], dWdown [D_out, H])``; dX with the settings "grads", None with "wgrads".

    gy: contiguous, aligned [M, D_out]; h: [M, H]; dgate_up: contiguous [M, 2H].

    Of two layers: h and ``dgate_up`` [M, 2H] are the hidden layer and its gradient, and the first weight [2H, D] is
    both ``gate_weight`` and ``up_weight``; its gradient and the second one's [D_out, 2H] are what is returned.
    """
    needs_x = name == "grads"
    M, D_out = gy.shape
    D = gate_weight.shape[1]
    x = as_rows(x, D, tma=True)
    dx = gy.new_empty(M, D) if needs_x else None
    dgate_up_weight = gy.new_empty(dgate_up.shape[1], D)
    ddown_weight = gy.new_empty(D_out, h.shape[1])
    launch = plan.launches.get(name)
    if launch is None:
        launch = plan.launches[name] = _launch(
            plan, plan.settings[name], gy, h, x, gate_weight, up_weight, dx, dgate_up_weight, ddown_weight
        )
    launch(
        plan.device_index,
        dgate_up,
        dgate_up if needs_x else None,
        gate_weight,
        up_weight if needs_x else None,
        dgate_up,
        dgate_up,
        x,
        gy,
        h,
        dx,
        dgate_up_weight,
        dgate_up_weight,
        ddown_weight,
        M,
        dgate_up.shape[1] // 2,
        D,
        D_out,
        h.shape[1],
    )
    return dx, dgate_up_weight, ddown_weight
