"""What the launches of the warp-specialised kernels share: rings, options, grids."""

from __future__ import annotations

from typing import Any

from ..launch import Launch, Tile
from ..plan import Plan
from ..settings import Settings
from ..settings.device import info
from .common import ceil_div, persistent_grid, resident_grid


def stages(settings: Settings) -> int:
    """Two at least: a stage is given back when the next has been waited for."""
    return max(2, settings.stages)


def _room(plan: Plan, settings: Settings, width: int) -> int:
    """Elements of shared memory that the operands' ring leaves: of block_m and ``width`` rows of block_k a stage."""
    operands = stages(settings) * (settings.block_m + width) * settings.block_k
    return (info(plan.device).shared - 1024) // plan.dtype.itemsize - operands  # barriers need less than a kilobyte


def store_buffers(plan: Plan, settings: Settings, width: int, columns: int, consumers: int) -> int:
    """Buffers [block_m, columns] that each consumer stores through: what the operands leave room for, two at most."""
    return max(1, min(2, _room(plan, settings, width) // (consumers * settings.block_m * columns)))


def chunk(settings: Settings, biases: bool) -> tuple[int, int]:
    """Rows and columns that a backward's epilogue takes at once: 64 at most, so that two are loaded ahead (a slot is
    given back when the next is there); the sums for bias gradients leave registers for half."""
    return min(settings.block_m, 64), min(settings.block_n // settings.parts, 32 if biases else 64)


def _chunk_slots(plan: Plan, settings: Settings, rows: int, columns: int, weights: int) -> int:
    """Chunks that each of two warpgroups keeps loaded: 256 columns of gate and up together, or what there is room for
    beside the operands and two chunks of h on their way out. A power of two, of which every use takes a remainder; two
    at least, as one is given back when the next is there."""
    room = _room(plan, settings, settings.block_n) // (2 * rows * columns) - 2
    slots = max(2, min(256 // columns, room) // weights)
    return 1 << (slots.bit_length() - 1)


def partial_rows(settings: Settings, M: int) -> int:
    """Rows of partial sums that a backward kernel of any family leaves: one a tile, of ours one a chunk."""
    rows = ceil_div(M, settings.block_m)
    return rows * (settings.block_m // chunk(settings, True)[0]) if settings.family == "gluon" else rows


def forward_launch(
    plan: Plan, settings: Settings, tiles: int, weights: int, tiles_of: dict[int, Tile], flags: tuple[Any, ...]
) -> Launch:
    """Of the forward to the hidden layer over one weight or two; ``flags`` from the activation to fast_math."""
    from ..kernels.gluon.hidden_forward import hidden_forward_gluon

    pingpong = settings.warps == 4
    columns = settings.block_n // settings.parts
    buffers = store_buffers(plan, settings, weights * settings.block_n, columns, 2 if pingpong else 1)
    constants = (stages(settings), buffers, settings.group, *flags, pingpong)
    grid = persistent_grid(plan, tiles, settings)
    return Launch(hidden_forward_gluon, grid, constants, tiles_of, num_warps=settings.warps)


def backward_launch(
    plan: Plan,
    settings: Settings,
    tiles: int,
    weights: int,
    tiles_of: dict[int, Tile],
    flags: tuple[Any, ...],
    cooperative: bool,
) -> Launch:
    """Of the backward to the hidden layer, of gate and up (weights 2) or one alone; ``flags`` from the activation on;
    cooperative: bias gradients are finished behind a grid barrier."""
    from ..kernels.gluon.hidden_backward import hidden_backward_gluon

    options: dict[str, Any] = {"num_warps": settings.warps}
    if cooperative:
        options["launch_cooperative_grid"] = True
    grid = resident_grid(plan, tiles) if cooperative else persistent_grid(plan, tiles, settings)
    rows, columns = tiles_of[2].block  # gate comes by chunks
    slots = _chunk_slots(plan, settings, rows, columns, weights)
    constants = (stages(settings), slots, settings.group, *flags)
    return Launch(hidden_backward_gluon, grid, constants, tiles_of, **options)
