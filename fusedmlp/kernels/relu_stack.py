"""Up to four Linear + ReLU layers in one launch, for small batches: a grid barrier between layers."""

import triton
import triton.language as tl

from .common import dot, grid_barrier


@triton.jit
def _layer(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    M,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0)):
        rows = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride + inner[None, :]
        w_at = w_ptr + columns[None, :].to(tl.int64) * K + inner[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            # .cg: the layer below wrote x from other SMs, whose lines L1 may not have
            x = tl.load(
                x_at + k,
                mask=(rows[:, None] < M) & (inner[None, :] < K - k),
                other=0.0,
                cache_modifier=".cg",
            )
            w = tl.load(w_at + k, mask=(columns[None, :] < N) & (inner[:, None] < K - k), other=0.0)
            acc = dot(x, w, acc, PRECISION)
        if HAS_BIAS:
            acc += tl.load(b_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        y = tl.where(acc <= 0.0, 0.0, acc).to(y_ptr.dtype.element_ty)
        at = y_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
        tl.store(at, y, mask=(rows[:, None] < M) & (columns[None, :] < N), cache_modifier=".cg")


@triton.jit(do_not_specialize=["M"])
def relu_stack(
    x_ptr,
    w1_ptr,
    b1_ptr,
    y1_ptr,
    w2_ptr,
    b2_ptr,
    y2_ptr,
    w3_ptr,
    b3_ptr,
    y3_ptr,
    w4_ptr,
    b4_ptr,
    y4_ptr,
    counter_ptr,
    M,
    K,
    N1,
    N2,
    N3,
    N4,
    x_stride,
    LAYERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS_1: tl.constexpr,
    BIAS_2: tl.constexpr,
    BIAS_3: tl.constexpr,
    BIAS_4: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y_i = relu(y_{i-1} W_i^T + b_i), y_0 = x [M, K]; all but x contiguous.

    The grid must be co-resident. counter: six int32 zeros, two for each barrier, since a fast program may reach the
    next barrier before the last one left this. Arguments of layers beyond LAYERS (2 to 4) are None.
    """
    _layer(x_ptr, w1_ptr, b1_ptr, y1_ptr, M, N1, K, x_stride, BLOCK_M, BLOCK_N, BLOCK_K, BIAS_1, PRECISION)
    grid_barrier(counter_ptr, tl.num_programs(0))
    _layer(y1_ptr, w2_ptr, b2_ptr, y2_ptr, M, N2, N1, N1, BLOCK_M, BLOCK_N, BLOCK_K, BIAS_2, PRECISION)
    if LAYERS >= 3:
        grid_barrier(counter_ptr + 2, tl.num_programs(0))
        _layer(y2_ptr, w3_ptr, b3_ptr, y3_ptr, M, N3, N2, N2, BLOCK_M, BLOCK_N, BLOCK_K, BIAS_3, PRECISION)
    if LAYERS >= 4:
        grid_barrier(counter_ptr + 4, tl.num_programs(0))
        _layer(y3_ptr, w4_ptr, b4_ptr, y4_ptr, M, N4, N3, N3, BLOCK_M, BLOCK_N, BLOCK_K, BIAS_4, PRECISION)
