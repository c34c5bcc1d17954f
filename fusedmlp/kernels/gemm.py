"""``dX = dG Wg + dU Wu`` as one product over the two weights, where they lie."""

import triton
import triton.language as tl

from .common import dot, tile_of


@triton.jit(do_not_specialize=["M"])
def dual_dgrad_tma(
    dgu_desc,
    w_desc,
    dx_desc,
    M,
    N,
    H,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    UP_FIRST: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Persistent. dgu [M, 2H] seen as [2, M, H], box [1, BLOCK_M, BLOCK_K]; the weights [H, N] seen as [2, H, N], box
    [1, BLOCK_K, BLOCK_N], the lower one in memory first (UP_FIRST: that is ``up``); dx box [BLOCK_M, BLOCK_N / PARTS].
    The three-dimensional views end each half where it ends, whatever H is."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(H, BLOCK_K)
    PART_N: tl.constexpr = BLOCK_N // PARTS
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(2 * steps):
            half = (step >= steps).to(tl.int32)
            k = (step - half * steps) * BLOCK_K
            if UP_FIRST:
                weight_half = 1 - half
            else:
                weight_half = half
            d = tl.reshape(dgu_desc.load([half, row, k]), (BLOCK_M, BLOCK_K))
            w = tl.reshape(w_desc.load([weight_half, k, col]), (BLOCK_K, BLOCK_N))
            acc = tl.dot(d, w, acc)
        if PARTS == 1:
            dx_desc.store([row, col], acc.to(dx_desc.dtype))
        else:
            tl.static_assert(PARTS == 2)
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART_N)), (0, 2, 1)))
            dx_desc.store([row, col], left.to(dx_desc.dtype))
            dx_desc.store([row, col + PART_N], right.to(dx_desc.dtype))


@triton.jit(do_not_specialize=["M"])
def dual_dgrad_pointer(
    dgu_ptr,
    wg_ptr,
    wu_ptr,
    dx_ptr,
    M,
    N,
    H,
    wg_stride,
    wu_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile a program. dgu [M, 2H] and dx [M, N] contiguous, wg and wu [H, N] with their row strides."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    d_at = dgu_ptr + rows[:, None].to(tl.int64) * (2 * H) + inner[None, :]
    wg_at = wg_ptr + inner[:, None].to(tl.int64) * wg_stride + columns[None, :]
    wu_at = wu_ptr + inner[:, None].to(tl.int64) * wu_stride + columns[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, H, BLOCK_K):
        d_mask = (rows[:, None] < M) & (inner[None, :] < H - k)
        w_mask = (inner[:, None] < H - k) & (columns[None, :] < N)
        acc = dot(
            tl.load(d_at + k, mask=d_mask, other=0.0),
            tl.load(wg_at, mask=w_mask, other=0.0),
            acc,
            PRECISION,
        )
        acc = dot(
            tl.load(d_at + H + k, mask=d_mask, other=0.0),
            tl.load(wu_at, mask=w_mask, other=0.0),
            acc,
            PRECISION,
        )
        wg_at += tl.cast(BLOCK_K, tl.int64) * wg_stride
        wu_at += tl.cast(BLOCK_K, tl.int64) * wu_stride
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    at = dx_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, acc.to(dx_ptr.dtype.element_ty), mask=mask)
