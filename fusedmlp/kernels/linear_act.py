"""``y = act(x W^T + b)`` in one kernel, optionally storing what comes before the activation."""

import triton
import triton.language as tl

from .activations import activate
from .common import dot, tile_of


@triton.jit(do_not_specialize=["M"])
def linear_act_tma(
    x_desc,
    w_desc,
    b_ptr,
    y_desc,
    pre_desc,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Persistent; boxes: x [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K], y and pre [BLOCK_M, BLOCK_N / PARTS]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    PART_N: tl.constexpr = BLOCK_N // PARTS
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(steps):
            x = x_desc.load([row, k * BLOCK_K])
            w = w_desc.load([col, k * BLOCK_K])
            acc = tl.dot(x, w.T, acc)
        if PARTS == 1:
            _store_tma(acc, b_ptr, y_desc, pre_desc, row, col, N, PART_N, ACT, HAS_BIAS, SAVE_PRE, FAST_MATH)
        else:
            tl.static_assert(PARTS == 2)
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART_N)), (0, 2, 1)))
            _store_tma(left, b_ptr, y_desc, pre_desc, row, col, N, PART_N, ACT, HAS_BIAS, SAVE_PRE, FAST_MATH)
            col += PART_N
            _store_tma(right, b_ptr, y_desc, pre_desc, row, col, N, PART_N, ACT, HAS_BIAS, SAVE_PRE, FAST_MATH)


@triton.jit
def _store_tma(
    acc,
    b_ptr,
    y_desc,
    pre_desc,
    row,
    col,
    N,
    PART_N: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    if HAS_BIAS:
        columns = col + tl.arange(0, PART_N)
        acc += tl.load(b_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    pre = acc.to(y_desc.dtype)  # rounded first, as eager does: backward starts from the same value
    if SAVE_PRE:
        pre_desc.store([row, col], pre)
    y_desc.store([row, col], activate(pre.to(tl.float32), ACT, FAST_MATH).to(y_desc.dtype))


@triton.jit(do_not_specialize=["M"])
def linear_act_pointer(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    pre_ptr,
    M,
    N,
    K,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile a program; x [M, K] and w [N, K] have their own row strides, y and pre [M, N] are contiguous."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride + inner[None, :]
    w_at = w_ptr + columns[None, :].to(tl.int64) * w_stride + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(x_at + k, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
        w = tl.load(w_at + k, mask=(columns[None, :] < N) & (inner[:, None] < K - k), other=0.0)
        acc = dot(x, w, acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(b_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    pre = acc.to(y_ptr.dtype.element_ty)
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    if SAVE_PRE:
        tl.store(pre_ptr + at, pre, mask=mask)
    y = activate(pre.to(tl.float32), ACT, FAST_MATH)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
