"""Elementwise kernels: the activation's own backward, and the partners of cuBLAS where a fused GEMM would lose.

All work in tasks of (band of rows, block of columns), so that bias gradients fall out as partial column sums.
"""

import triton
import triton.language as tl

from .activations import activate, activate_grad, grad_through, times_derivative
from .common import finish_column_sums, grid_barrier, round_as_stored, store_partial


@triton.jit
def act_forward(pre_ptr, y_ptr, elements, BLOCK: tl.constexpr, ACT: tl.constexpr, FAST_MATH: tl.constexpr):
    """y = act(pre), both contiguous with ``elements`` values. y may be pre: a thread stores what it loaded.

    Whether 16 divides the elements is compiled in: without that the mask may end anywhere, and each value is a load.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    pre = tl.load(pre_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, activate(pre, ACT, FAST_MATH).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "parts"])
def act_grad(
    gy_ptr,
    saved_ptr,
    dpre_ptr,
    a_ptr,
    sum_ptr,
    db_ptr,
    counter_ptr,
    M,
    N,
    gy_row_stride,
    gy_col_stride,
    parts,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    SAVES_OUTPUT: tl.constexpr,
    STORE_A: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """dpre = gy * act', and db = column sums of dpre. gy [M, N] with any strides (an expanded gradient is read as it
    is), saved, dpre and a [M, N] contiguous; sum: fp32 [parts, N]."""
    blocks = tl.cdiv(N, BLOCK_N)
    band = tl.cdiv(M, parts)
    for task in range(tl.program_id(0), parts * blocks, tl.num_programs(0)):
        part = task // blocks
        columns = (task % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        first = part * band
        last = min(M, first + band)
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for m in range(first, last, ROWS):
            rows = (m + tl.arange(0, ROWS)).to(tl.int64)
            mask = (rows[:, None] < last) & (columns[None, :] < N)
            gy_at = gy_ptr + rows[:, None] * gy_row_stride + columns[None, :].to(tl.int64) * gy_col_stride
            at = rows[:, None] * N + columns[None, :]
            gy = tl.load(gy_at, mask=mask, other=0.0).to(tl.float32)
            saved = tl.load(saved_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dpre, a = grad_through(gy, saved, ACT, SAVES_OUTPUT, FAST_MATH)
            tl.debug_barrier()  # gy and saved are read: their memory may be that of dpre and a
            tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=mask)
            if STORE_A:
                tl.store(a_ptr + at, a.to(a_ptr.dtype.element_ty), mask=mask)
            if BIAS_GRAD:
                total += tl.where(mask, dpre, 0.0)
        if BIAS_GRAD:
            store_partial(tl.sum(total, axis=0), sum_ptr, part, columns, N)
    if BIAS_GRAD:
        grid_barrier(counter_ptr, tl.num_programs(0))
        finish_column_sums(sum_ptr, db_ptr, parts, N, 32, 64)


@triton.jit(do_not_specialize=["M"])
def glu_act_forward(
    gate_up_ptr,
    h_ptr,
    M,
    H,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """h = act(gate) * up; gate_up [M, 2H] and h [M, H] contiguous. One task a program."""
    blocks = tl.cdiv(H, BLOCK_N)
    rows = ((tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < M) & (columns[None, :] < H)
    at = rows[:, None] * (2 * H) + columns[None, :]
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + H, mask=mask, other=0.0).to(tl.float32)
    h = round_as_stored(activate(gate, ACT, FAST_MATH), h_ptr.dtype.element_ty) * up
    tl.store(h_ptr + rows[:, None] * H + columns[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "parts"])
def glu_act_backward(
    dh_ptr,
    gate_up_ptr,
    dgate_up_ptr,
    h_ptr,
    gate_sum_ptr,
    up_sum_ptr,
    dbg_ptr,
    dbu_ptr,
    counter_ptr,
    M,
    H,
    parts,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACT: tl.constexpr,
    STORE_H: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """dgate, dup and h from dh and the saved gate and up; all contiguous. gate_sum, up_sum: fp32 [parts, H]."""
    DTYPE: tl.constexpr = dh_ptr.dtype.element_ty
    blocks = tl.cdiv(H, BLOCK_N)
    band = tl.cdiv(M, parts)
    for task in range(tl.program_id(0), parts * blocks, tl.num_programs(0)):
        part = task // blocks
        columns = (task % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        first = part * band
        last = min(M, first + band)
        gate_total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        up_total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for m in range(first, last, ROWS):
            rows = (m + tl.arange(0, ROWS)).to(tl.int64)
            mask = (rows[:, None] < last) & (columns[None, :] < H)
            at = rows[:, None] * (2 * H) + columns[None, :]
            h_at = rows[:, None] * H + columns[None, :]
            dh = tl.load(dh_ptr + h_at, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + at + H, mask=mask, other=0.0).to(tl.float32)
            a, d = activate_grad(gate, ACT, FAST_MATH)
            a = round_as_stored(a, DTYPE)
            dgate = times_derivative(round_as_stored(dh * up, DTYPE), d, ACT)
            dup = dh * a
            tl.debug_barrier()  # dh, gate and up are read: their memory may be that of h, dgate and dup
            tl.store(dgate_up_ptr + at, dgate.to(DTYPE), mask=mask)
            tl.store(dgate_up_ptr + at + H, dup.to(DTYPE), mask=mask)
            if STORE_H:
                tl.store(h_ptr + h_at, (a * up).to(DTYPE), mask=mask)
            if BIAS_GRAD:
                gate_total += tl.where(mask, dgate, 0.0)
                up_total += tl.where(mask, dup, 0.0)
        if BIAS_GRAD:
            store_partial(tl.sum(gate_total, axis=0), gate_sum_ptr, part, columns, H)
            store_partial(tl.sum(up_total, axis=0), up_sum_ptr, part, columns, H)
    if BIAS_GRAD:
        grid_barrier(counter_ptr, tl.num_programs(0))
        finish_column_sums(gate_sum_ptr, dbg_ptr, parts, H, 32, 64)
        finish_column_sums(up_sum_ptr, dbu_ptr, parts, H, 32, 64)
