"""``dPre = (dY W2) * act'`` in one kernel: the backward of fc2 and of the activation below it.

``saved`` is what the activation keeps: its output (relu, sigmoid) or its input, from which the activated value is
made again for dW2 where it is asked for. Bias gradients as in :mod:`.glu_backward`.
"""

import triton
import triton.language as tl

from .activations import grad_through
from .common import (
    dot,
    finish_column_sums,
    grid_barrier,
    partial_column_sums,
    round_as_stored,
    store_partial,
    tile_of,
)


@triton.jit
def _epilogue_tma(
    acc,
    saved_desc,
    dpre_desc,
    a_desc,
    pre_sum_ptr,
    pid_m,
    row,
    col,
    M,
    N,
    BLOCK_M: tl.constexpr,
    PART_N: tl.constexpr,
    ACT: tl.constexpr,
    SAVES_OUTPUT: tl.constexpr,
    STORE_A: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    acc = round_as_stored(acc, dpre_desc.dtype)
    saved = saved_desc.load([row, col]).to(tl.float32)
    dpre, a = grad_through(acc, saved, ACT, SAVES_OUTPUT, FAST_MATH)
    dpre_desc.store([row, col], dpre.to(dpre_desc.dtype))
    if STORE_A:
        a_desc.store([row, col], a.to(a_desc.dtype))
    if BIAS_GRAD:
        inside = (row + tl.arange(0, BLOCK_M) < M)[:, None]  # rows past M hold 0 * W2, NaN where W2 is infinite
        sums = tl.sum(tl.where(inside, dpre, 0.0), axis=0)
        store_partial(sums, pre_sum_ptr, pid_m, col + tl.arange(0, PART_N), N)


@triton.jit
def _finish_biases(
    counter_ptr,
    pre_sum_ptr,
    gy_sum_ptr,
    db_ptr,
    dby_ptr,
    tiles_m,
    gy_parts,
    N,
    K,
    BIAS_GRAD: tl.constexpr,
    OUT_BIAS_GRAD: tl.constexpr,
):
    if BIAS_GRAD or OUT_BIAS_GRAD:
        grid_barrier(counter_ptr, tl.num_programs(0))
        if BIAS_GRAD:
            finish_column_sums(pre_sum_ptr, db_ptr, tiles_m, N, 32, 64)
        if OUT_BIAS_GRAD:
            finish_column_sums(gy_sum_ptr, dby_ptr, gy_parts, K, 32, 64)


@triton.jit(do_not_specialize=["M", "gy_parts"])
def act_backward_tma(
    gy_desc,
    w_desc,
    saved_desc,
    dpre_desc,
    a_desc,
    gy_ptr,
    pre_sum_ptr,
    gy_sum_ptr,
    db_ptr,
    dby_ptr,
    counter_ptr,
    M,
    N,
    K,
    gy_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ACT: tl.constexpr,
    SAVES_OUTPUT: tl.constexpr,
    STORE_A: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    OUT_BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Persistent. gy [M, K] box [BLOCK_M, BLOCK_K], w = W2 [K, N] box [BLOCK_K, BLOCK_N]; saved, dpre, a [M, N] box
    [BLOCK_M, BLOCK_N / PARTS]. pre_sum: fp32 [tiles_m, N]; gy_sum: fp32 [gy_parts, K]. With bias gradients the grid
    must be co-resident."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    PART_N: tl.constexpr = BLOCK_N // PARTS
    if OUT_BIAS_GRAD:
        partial_column_sums(gy_ptr, gy_sum_ptr, M, K, K, gy_parts, 32, 64)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(steps):
            gy = gy_desc.load([row, k * BLOCK_K])
            w = w_desc.load([k * BLOCK_K, col])
            acc = tl.dot(gy, w, acc)
        # fmt: off
        if PARTS == 1:
            _epilogue_tma(acc, saved_desc, dpre_desc, a_desc, pre_sum_ptr, pid_m, row, col, M, N, BLOCK_M, PART_N, ACT,
                          SAVES_OUTPUT, STORE_A, BIAS_GRAD, FAST_MATH)
        else:
            tl.static_assert(PARTS == 2)
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART_N)), (0, 2, 1)))
            _epilogue_tma(left, saved_desc, dpre_desc, a_desc, pre_sum_ptr, pid_m, row, col, M, N, BLOCK_M, PART_N, ACT,
                          SAVES_OUTPUT, STORE_A, BIAS_GRAD, FAST_MATH)
            _epilogue_tma(right, saved_desc, dpre_desc, a_desc, pre_sum_ptr, pid_m, row, col + PART_N, M, N, BLOCK_M,
                          PART_N, ACT, SAVES_OUTPUT, STORE_A, BIAS_GRAD, FAST_MATH)
        # fmt: on
    _finish_biases(
        counter_ptr,
        pre_sum_ptr,
        gy_sum_ptr,
        db_ptr,
        dby_ptr,
        tiles_m,
        gy_parts,
        N,
        K,
        BIAS_GRAD,
        OUT_BIAS_GRAD,
    )


@triton.jit(do_not_specialize=["M", "gy_parts"])
def act_backward_pointer(
    gy_ptr,
    w_ptr,
    saved_ptr,
    dpre_ptr,
    a_ptr,
    pre_sum_ptr,
    gy_sum_ptr,
    db_ptr,
    dby_ptr,
    counter_ptr,
    M,
    N,
    K,
    w_stride,
    gy_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    SAVES_OUTPUT: tl.constexpr,
    STORE_A: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    OUT_BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs loop over tiles. gy [M, K], saved, dpre, a [M, N] contiguous; w = W2 [K, N] with its row stride."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    DTYPE: tl.constexpr = gy_ptr.dtype.element_ty
    inner = tl.arange(0, BLOCK_K)
    if OUT_BIAS_GRAD:
        partial_column_sums(gy_ptr, gy_sum_ptr, M, K, K, gy_parts, 32, 64)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        gy_at = gy_ptr + rows[:, None].to(tl.int64) * K + inner[None, :]
        w_at = w_ptr + inner[:, None].to(tl.int64) * w_stride + columns[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            gy = tl.load(gy_at + k, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
            w = tl.load(w_at, mask=(inner[:, None] < K - k) & (columns[None, :] < N), other=0.0)
            acc = dot(gy, w, acc, PRECISION)
            w_at += tl.cast(BLOCK_K, tl.int64) * w_stride
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        at = rows[:, None].to(tl.int64) * N + columns[None, :]
        saved = tl.load(saved_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dpre, a = grad_through(round_as_stored(acc, DTYPE), saved, ACT, SAVES_OUTPUT, FAST_MATH)
        tl.debug_barrier()  # saved is read: its memory may be that of dpre
        tl.store(dpre_ptr + at, dpre.to(DTYPE), mask=mask)
        if STORE_A:
            tl.store(a_ptr + at, a.to(DTYPE), mask=mask)
        if BIAS_GRAD:
            store_partial(tl.sum(tl.where(mask, dpre, 0.0), axis=0), pre_sum_ptr, pid_m, columns, N)
    _finish_biases(
        counter_ptr,
        pre_sum_ptr,
        gy_sum_ptr,
        db_ptr,
        dby_ptr,
        tiles_m,
        gy_parts,
        N,
        K,
        BIAS_GRAD,
        OUT_BIAS_GRAD,
    )
