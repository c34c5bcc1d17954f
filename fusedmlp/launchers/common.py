"""What the launchers share: row views, descriptors, grids, scratch for bias gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..launch import Launch, Tile
from ..plan import Plan
from ..settings import Settings
from ..settings.device import info

MAX_TMA_STRIDE = 1 << 40  # bytes; CUDA driver API, cuTensorMapEncodeTiled, globalStrides


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def prepared(plan: Plan, key: Any, make: Callable[[], Launch]) -> Launch:
    """The launch that the plan keeps under ``key``, made at its first use."""
    found = plan.launches.get(key)
    if found is None:
        found = plan.launches[key] = make()
    return found  # type: ignore[no-any-return]


def as_rows(x: Tensor, width: int, tma: bool) -> Tensor:
    """x seen as [M, width] with readable rows: unit inner stride, rows apart; copied where it is not so.

    TMA also needs a base and a row stride that are multiples of 16 bytes.
    """
    if x.dim() == 2 and x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    rows = x.reshape(-1, width)
    readable = (rows.stride(1) == 1 or width == 1) and (rows.stride(0) >= width or rows.shape[0] == 1)
    if readable and tma:
        size = rows.element_size()
        stride = rows.stride(0) * size if rows.shape[0] > 1 else 0
        readable = rows.data_ptr() % 16 == 0 and stride % 16 == 0
    return rows if readable else rows.clone(memory_format=torch.contiguous_format)


def as_contiguous(x: Tensor, width: int) -> Tensor:
    """x as contiguous, 16-byte aligned [M, width]; copied where it is not so."""
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a [M, K] tensor, as the product that it comes to."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def weight_grad(plan: Plan, dy: Tensor, x: Tensor) -> Tensor:
    """``dy^T x``, [N, K], of [M, N] and [..., K]: a product of cuBLAS, or two where one would leave tokens out."""
    x = as_rows(x, x.shape[-1], tma=False)
    last = plan.last_tokens(dy.shape[1], x.shape[1])
    if not last:
        return torch.mm(dy.t(), x)
    # The few last ones first: what is rounded twice is the small part, and it may be written over.
    few = torch.mm(dy[-last:].t(), x[-last:])
    return torch.addmm(few, dy[:-last].t(), x[:-last], out=few)


def row_stride(x: Tensor) -> int:
    """Of a [M, K] tensor; a single row has none that matters."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def rows_tile(x: Tensor, block_rows: int, block_columns: int) -> Tile:
    """A [M, N] tensor with readable rows."""
    return Tile((x.shape[0], x.shape[1]), (row_stride(x), 1), (block_rows, block_columns))


def half_tiles(M: int, H: int, block_rows: int, block_columns: int) -> tuple[Tile, Tile]:
    """The two halves of a contiguous [M, 2H], apart, so that a ragged tile of one cannot reach into the other."""
    block = (block_rows, block_columns)
    return Tile((M, H), (2 * H, 1), block), Tile((M, H), (2 * H, 1), block, offset=H)


def stacked_halves(M: int, H: int, block_rows: int, block_columns: int) -> Tile:
    """A contiguous [M, 2H] seen as [2, M, H]."""
    return Tile((2, M, H), (H, 2 * H, 1), (1, block_rows, block_columns))


def pair_tile(weight: Tensor, both: int, block_rows: int, block_columns: int) -> Tile:
    """Two weights of one shape as [2, rows, columns]; ``both`` of them (2) or one (1) in an access."""
    return Tile((2, *weight.shape), (0, row_stride(weight), 1), (both, block_rows, block_columns))


def pair_order(plan: Plan, gate: Tensor, up: Tensor) -> bool | None:
    """Whether ``up`` lies before ``gate``; None where one descriptor cannot span both.

    Its outer stride is their distance, and the row stride must be the same.
    """
    distance = up.data_ptr() - gate.data_ptr()
    if not plan.pairs or distance == 0 or abs(distance) >= MAX_TMA_STRIDE:
        return None
    return distance < 0


def persistent_grid(plan: Plan, tiles: int, settings: Settings) -> int:
    return min(tiles, info(plan.device).sms * settings.ctas_per_sm)


def resident_grid(plan: Plan, tiles: int, ctas_per_sm: int = 1) -> int:
    """A grid that is co-resident, for kernels with a grid barrier; the interpreter runs one program at a time."""
    if plan.device_index is None:
        return 1
    return min(tiles, info(plan.device).sms * ctas_per_sm)


def sum_parts(plan: Plan, N: int) -> int:
    """Bands of rows for column sums over [M, N] beside a GEMM: enough tasks for every program, none tiny."""
    blocks = ceil_div(N, 64)
    wanted = ceil_div(2 * info(plan.device).sms, blocks)
    return max(1, min(wanted, ceil_div(plan.M, 32)))


def scratch(device: torch.device, *shapes: tuple[int, int]) -> list[Tensor]:
    """fp32 buffers for partial sums, out of one allocation."""
    sizes = [a * b for a, b in shapes]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes)]


def launch_options(settings: Settings, cooperative: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": settings.warps, "num_stages": settings.stages}
    if cooperative:
        options["launch_cooperative_grid"] = True
    return options


def pointwise_rows(plan: Plan) -> int:
    """Rows of 128 columns that a program takes at a time; before 9.0 the ptxas of Triton 3.8 would spill 32 of them."""
    return 32 if info(plan.device).capability >= (9, 0) else 16


def pointwise_options(cooperative: bool) -> dict[str, Any]:
    """8 warps; behind a grid barrier two programs a multiprocessor must fit, so 128 registers a thread at most."""
    if cooperative:
        return {"num_warps": 8, "maxnreg": 128, "launch_cooperative_grid": True}
    return {"num_warps": 8}
