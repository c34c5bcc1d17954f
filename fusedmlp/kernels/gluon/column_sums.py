"""Bias gradients beside a warp-specialised product: column sums in fp32, by bands of rows, added in a fixed order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common import grid_barrier


@gluon.jit
def store_band_sums(x, partial_ptr, row, column, M, N):
    """Column sums of a chunk x [ROWS, COLUMNS] at (row, column) to row ``row / ROWS`` of partial [bands, N], fp32."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    inside = gl.expand_dims(rows < M, 1)  # rows past M hold 0 * weight, NaN where the weight is infinite
    sums = gl.sum(gl.where(inside, x, 0.0), axis=0)
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    gl.store(partial_ptr + (row // ROWS) * N + columns, sums, mask=columns < N, cache_modifier=".cg")


@gluon.jit
def partial_column_sums(x_ptr, partial_ptr, M, N, parts, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """This program's share of the column sums of a contiguous x [M, N], over ``parts`` bands of rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    blocks = gl.cdiv(N, COLUMNS)
    band = gl.cdiv(M, parts)
    for task in range(gl.program_id(0), parts * blocks, gl.num_programs(0)):
        part = task // blocks
        columns = (task % blocks) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        last = gl.minimum(M, (part + 1) * band)
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for first in range(part * band, last, ROWS):
            rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            mask = gl.expand_dims(rows < last, 1) & gl.expand_dims(columns < N, 0)
            at = gl.expand_dims(rows.to(gl.int64) * N, 1) + gl.expand_dims(columns, 0)
            total += gl.load(x_ptr + at, mask=mask, other=0.0).to(gl.float32)
        sums = gl.sum(total, axis=0)
        gl.store(partial_ptr + part * N + columns, sums, mask=columns < N, cache_modifier=".cg")


@gluon.jit
def finish_column_sums(partial_ptr, out_ptr, parts, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """``out[n] = sum over p of partial[p, n]``, shared out over the grid."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [32 // (COLUMNS // 2), COLUMNS // 2], [gl.num_warps(), 1], [1, 0])
    for block in range(gl.program_id(0), gl.cdiv(N, COLUMNS), gl.num_programs(0)):
        columns = block * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for first in range(0, parts, ROWS):
            rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            mask = gl.expand_dims(rows < parts, 1) & gl.expand_dims(columns < N, 0)
            at = gl.expand_dims(rows * N, 1) + gl.expand_dims(columns, 0)
            total += gl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        sums = gl.sum(total, axis=0)
        gl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < N)


@gluon.jit
def barrier(counter_ptr):
    """All programs' partial sums are there after it. The grid must be co-resident."""
    grid_barrier(counter_ptr, gl.num_programs(0))
