"""Pieces that several kernels share: tile order, the grid barrier, column sums in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The (row, column) of a tile, in bands of GROUP tile rows: neighbouring programs share weight tiles in L2."""
    per_band = GROUP * tiles_n
    band = tile // per_band
    first = band * GROUP
    rows = min(tiles_m - first, GROUP)
    rest = tile % per_band
    return first + rest % rows, rest // rows


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a b``. In TF32 the operands are rounded to nearest first, as cuBLAS does: the tensor cores would cut
    their low bits off, which more than doubles the error."""
    if PRECISION == "tf32":
        if a.dtype == tl.float32:
            a = _round_to_tf32(a)
            b = _round_to_tf32(b)
        acc = tl.dot(a, b, acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _round_to_tf32(x):
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def round_as_stored(x, DTYPE: tl.constexpr):
    """x as it would be had it been stored in fp16, where eager's intermediate may overflow to inf; else x.

    The other dtypes have fp32's range, so that keeping fp32 there only makes the result more accurate.
    """
    if DTYPE == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def grid_barrier(counter_ptr, programs):
    """Wait until every program of the grid is here. counter: two int32, zero before and after.

    The programs must be co-resident (``launch_cooperative_grid``), else this never ends. What any program stored
    before is visible after to loads that bypass L1 (``.cg``).
    """
    tl.debug_barrier()  # all threads' stores come before the release below
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < programs:
        pass
    tl.debug_barrier()
    # The last to leave resets both, so that the next launch (or a replay of a graph) finds zeros.
    if tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(counter_ptr + 1, 0, sem="release", scope="gpu")


@triton.jit
def store_partial(sums, partial_ptr, part, columns, N):
    """Row ``part`` of the partial column sums; partial: fp32 [parts, N], sums: fp32 of ``columns``."""
    row = partial_ptr + tl.cast(part, tl.int64) * N
    tl.store(row + columns, sums, mask=columns < N, cache_modifier=".cg")


@triton.jit
def partial_column_sums(x_ptr, partial_ptr, M, N, x_stride, parts, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's share of the column sums of x [M, N], as partial sums over ``parts`` bands of rows."""
    blocks = tl.cdiv(N, BLOCK_N)
    band = tl.cdiv(M, parts)
    for task in range(tl.program_id(0), parts * blocks, tl.num_programs(0)):
        part = task // blocks
        columns = (task % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        first = part * band
        last = min(M, first + band)
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for m in range(first, last, ROWS):
            rows = m + tl.arange(0, ROWS)
            mask = (rows[:, None] < last) & (columns[None, :] < N)
            at = x_ptr + rows[:, None].to(tl.int64) * x_stride + columns[None, :]
            total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        store_partial(tl.sum(total, axis=0), partial_ptr, part, columns, N)


@triton.jit
def finish_column_sums(partial_ptr, out_ptr, parts, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """``out[n] = sum over p of partial[p, n]`` in an order that never changes, shared out over the grid."""
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for p in range(0, parts, ROWS):
            rows = p + tl.arange(0, ROWS)
            mask = (rows[:, None] < parts) & (columns[None, :] < N)
            at = partial_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
            total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        sums = tl.sum(total, axis=0)
        tl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < N)
