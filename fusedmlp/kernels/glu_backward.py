"""Gated backward: dH = dY Wd, with dGate, dUp and the hidden activation made in the epilogue.

From gate g and up u (both saved): h = act(g) u, dU = dH act(g), dG = dH u act'(g). Bias gradients are column sums
of dG, dU and dY in fp32: partial sums by tile, then a grid barrier, then the partials in a fixed order.
"""

import triton
import triton.language as tl

from .activations import activate_grad, times_derivative
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
def gated_grads(dh, gate, up, ACT: tl.constexpr, FAST_MATH: tl.constexpr, DTYPE: tl.constexpr):
    """(dGate, dUp, h), all fp32."""
    dh = round_as_stored(dh, DTYPE)
    a, d = activate_grad(gate, ACT, FAST_MATH)
    a = round_as_stored(a, DTYPE)
    return times_derivative(round_as_stored(dh * up, DTYPE), d, ACT), dh * a, a * up


@triton.jit
def _epilogue_tma(
    dh,
    gate_desc,
    up_desc,
    dgate_desc,
    dup_desc,
    h_desc,
    gate_sum_ptr,
    up_sum_ptr,
    pid_m,
    row,
    col,
    M,
    H,
    BLOCK_M: tl.constexpr,
    PART_N: tl.constexpr,
    ACT: tl.constexpr,
    STORE_H: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    gate = gate_desc.load([row, col]).to(tl.float32)
    up = up_desc.load([row, col]).to(tl.float32)
    dgate, dup, h = gated_grads(dh, gate, up, ACT, FAST_MATH, dgate_desc.dtype)
    dgate_desc.store([row, col], dgate.to(dgate_desc.dtype))
    dup_desc.store([row, col], dup.to(dup_desc.dtype))
    if STORE_H:
        h_desc.store([row, col], h.to(h_desc.dtype))
    if BIAS_GRAD:
        columns = col + tl.arange(0, PART_N)
        inside = (row + tl.arange(0, BLOCK_M) < M)[:, None]  # rows past M hold 0 * Wd, NaN where Wd is infinite
        store_partial(tl.sum(tl.where(inside, dgate, 0.0), axis=0), gate_sum_ptr, pid_m, columns, H)
        store_partial(tl.sum(tl.where(inside, dup, 0.0), axis=0), up_sum_ptr, pid_m, columns, H)


@triton.jit
def _finish_biases(
    counter_ptr,
    gate_sum_ptr,
    up_sum_ptr,
    gy_sum_ptr,
    dbg_ptr,
    dbu_ptr,
    dbd_ptr,
    tiles_m,
    gy_parts,
    H,
    K,
    BIAS_GRAD: tl.constexpr,
    DOWN_BIAS_GRAD: tl.constexpr,
):
    if BIAS_GRAD or DOWN_BIAS_GRAD:
        grid_barrier(counter_ptr, tl.num_programs(0))
        if BIAS_GRAD:
            finish_column_sums(gate_sum_ptr, dbg_ptr, tiles_m, H, 32, 64)
            finish_column_sums(up_sum_ptr, dbu_ptr, tiles_m, H, 32, 64)
        if DOWN_BIAS_GRAD:
            finish_column_sums(gy_sum_ptr, dbd_ptr, gy_parts, K, 32, 64)


@triton.jit(do_not_specialize=["M", "gy_parts"])
def glu_backward_tma(
    gy_desc,
    w_desc,
    gate_desc,
    up_desc,
    dgate_desc,
    dup_desc,
    h_desc,
    gy_ptr,
    gate_sum_ptr,
    up_sum_ptr,
    gy_sum_ptr,
    dbg_ptr,
    dbu_ptr,
    dbd_ptr,
    counter_ptr,
    M,
    H,
    K,
    gy_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ACT: tl.constexpr,
    STORE_H: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    DOWN_BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Persistent. gy [M, K] box [BLOCK_M, BLOCK_K], w = Wd [K, H] box [BLOCK_K, BLOCK_N]; gate, up, dgate, dup, h
    [M, H] box [BLOCK_M, BLOCK_N / PARTS]. gate_sum, up_sum: fp32 [tiles_m, H]; gy_sum: fp32 [gy_parts, K]. With
    bias gradients the grid must be co-resident (a grid barrier stands before the last additions)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(H, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    PART_N: tl.constexpr = BLOCK_N // PARTS
    if DOWN_BIAS_GRAD:
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
            _epilogue_tma(acc, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
        elif PARTS == 2:
            a, b = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART_N)), (0, 2, 1)))
            _epilogue_tma(a, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
            _epilogue_tma(b, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col + PART_N, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
        else:
            tl.static_assert(PARTS == 4)
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            a, b = tl.split(tl.permute(tl.reshape(left, (BLOCK_M, 2, PART_N)), (0, 2, 1)))
            _epilogue_tma(a, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
            _epilogue_tma(b, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col + PART_N, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
            c, d = tl.split(tl.permute(tl.reshape(right, (BLOCK_M, 2, PART_N)), (0, 2, 1)))
            _epilogue_tma(c, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col + 2 * PART_N, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
            _epilogue_tma(d, gate_desc, up_desc, dgate_desc, dup_desc, h_desc, gate_sum_ptr, up_sum_ptr, pid_m,
                          row, col + 3 * PART_N, M, H, BLOCK_M, PART_N, ACT, STORE_H, BIAS_GRAD, FAST_MATH)
        # fmt: on
    _finish_biases(
        counter_ptr,
        gate_sum_ptr,
        up_sum_ptr,
        gy_sum_ptr,
        dbg_ptr,
        dbu_ptr,
        dbd_ptr,
        tiles_m,
        gy_parts,
        H,
        K,
        BIAS_GRAD,
        DOWN_BIAS_GRAD,
    )


@triton.jit(do_not_specialize=["M", "gy_parts"])
def glu_backward_pointer(
    gy_ptr,
    w_ptr,
    gate_up_ptr,
    dgate_up_ptr,
    h_ptr,
    gate_sum_ptr,
    up_sum_ptr,
    gy_sum_ptr,
    dbg_ptr,
    dbu_ptr,
    dbd_ptr,
    counter_ptr,
    M,
    H,
    K,
    w_stride,
    gy_parts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    STORE_H: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    DOWN_BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs loop over tiles. gy [M, K], gate_up and dgate_up [M, 2H], h [M, H] contiguous; w = Wd [K, H]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(H, BLOCK_N)
    DTYPE: tl.constexpr = gy_ptr.dtype.element_ty
    inner = tl.arange(0, BLOCK_K)
    if DOWN_BIAS_GRAD:
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
            w = tl.load(w_at, mask=(inner[:, None] < K - k) & (columns[None, :] < H), other=0.0)
            acc = dot(gy, w, acc, PRECISION)
            w_at += tl.cast(BLOCK_K, tl.int64) * w_stride
        mask = (rows[:, None] < M) & (columns[None, :] < H)
        at = rows[:, None].to(tl.int64) * (2 * H) + columns[None, :]
        gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + H, mask=mask, other=0.0).to(tl.float32)
        dgate, dup, h = gated_grads(acc, gate, up, ACT, FAST_MATH, DTYPE)
        tl.debug_barrier()  # gate and up are read: their memory may be that of dgate and dup
        tl.store(dgate_up_ptr + at, dgate.to(DTYPE), mask=mask)
        tl.store(dgate_up_ptr + at + H, dup.to(DTYPE), mask=mask)
        if STORE_H:
            tl.store(h_ptr + rows[:, None].to(tl.int64) * H + columns[None, :], h.to(DTYPE), mask=mask)
        if BIAS_GRAD:
            store_partial(tl.sum(tl.where(mask, dgate, 0.0), axis=0), gate_sum_ptr, pid_m, columns, H)
            store_partial(tl.sum(tl.where(mask, dup, 0.0), axis=0), up_sum_ptr, pid_m, columns, H)
    _finish_biases(
        counter_ptr,
        gate_sum_ptr,
        up_sum_ptr,
        gy_sum_ptr,
        dbg_ptr,
        dbu_ptr,
        dbd_ptr,
        tiles_m,
        gy_parts,
        H,
        K,
        BIAS_GRAD,
        DOWN_BIAS_GRAD,
    )
