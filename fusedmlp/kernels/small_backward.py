"""The backward's products for small batches, each weight streamed once, as in :mod:`fusedmlp.kernels.small_batch`.

The weights lie across here: a tile of them is read along its rows, and is the left operand transposed.
"""

import triton
import triton.language as tl

from .activations import grad_through
from .common import dot, round_as_stored
from .glu_backward import gated_grads
from .small_batch import share_sum


@triton.jit(do_not_specialize=["M"])
def hidden_backward_small(
    gy_ptr,
    w_ptr,
    saved_ptr,
    grad_ptr,
    h_ptr,
    db_ptr,
    dbu_ptr,
    dby_ptr,
    M,
    N,
    K,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    SAVES_OUTPUT: tl.constexpr,
    STORE_H: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    OUT_BIAS_GRAD: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Backward to the hidden layer, ``dH = dY W``, BLOCK_N columns a program, of all tokens, so that bias gradients
    are sums within a program.

    gy [M, K], h [M, N] contiguous, w [K, N] with its row stride. Gated: saved [M, 2N] holds gate and up, grad dGate and
    dUp; else saved [M, N] is what the activation keeps, grad dPre. grad may be saved: a tile is read before it is
    written. db, dbu [N]: of gate (or of the layer) and of up. dby [K]: column sums of gy, by programs behind the rest.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    if tl.program_id(0) < tiles_n:
        DTYPE: tl.constexpr = gy_ptr.dtype.element_ty
        WIDTH: tl.constexpr = 2 if GATED else 1  # values that saved and grad have of a hidden one
        features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_N,), tl.float32)
        up_total = tl.zeros((BLOCK_N,), tl.float32)
        for m in range(0, M, BLOCK_M):
            tokens = m + tl.arange(0, BLOCK_M)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            acc = _across(acc, gy_ptr, K, w_ptr, w_stride, tokens, features, 0, K, M, N, K, BLOCK_K, PRECISION)
            mask = (tokens[None, :] < M) & (features[:, None] < N)
            at = tokens[None, :].to(tl.int64) * (WIDTH * N) + features[:, None]
            saved = tl.load(saved_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(saved_ptr + at + N, mask=mask, other=0.0).to(tl.float32)
                grad, dup, h = gated_grads(acc, saved, up, ACT, FAST_MATH, DTYPE)
                tl.debug_barrier()  # gate and up are read: their memory may be that of dgate and dup
                tl.store(grad_ptr + at + N, dup.to(DTYPE), mask=mask)
                if BIAS_GRAD:  # rows past M hold 0 * W, NaN where W is infinite
                    up_total += tl.sum(tl.where(mask, dup, 0.0), axis=1)
            else:
                grad, h = grad_through(round_as_stored(acc, DTYPE), saved, ACT, SAVES_OUTPUT, FAST_MATH)
                tl.debug_barrier()
            tl.store(grad_ptr + at, grad.to(DTYPE), mask=mask)
            if STORE_H:
                tl.store(h_ptr + tokens[None, :].to(tl.int64) * N + features[:, None], h.to(DTYPE), mask=mask)
            if BIAS_GRAD:
                total += tl.sum(tl.where(mask, grad, 0.0), axis=1)
        if BIAS_GRAD:
            tl.store(db_ptr + features, total.to(DTYPE), mask=features < N)
            if GATED:
                tl.store(dbu_ptr + features, up_total.to(DTYPE), mask=features < N)
    elif OUT_BIAS_GRAD:
        columns = (tl.program_id(0) - tiles_n) * 128 + tl.arange(0, 128)
        ROWS: tl.constexpr = 16
        sums = tl.zeros((128,), tl.float32)
        for m in range(0, M, ROWS):
            rows = m + tl.arange(0, ROWS)
            at = rows[:, None].to(tl.int64) * K + columns[None, :]
            mask = (rows[:, None] < M) & (columns[None, :] < K)
            sums += tl.sum(tl.load(gy_ptr + at, mask=mask, other=0.0).to(tl.float32), axis=0)
        tl.store(dby_ptr + columns, sums.to(dby_ptr.dtype.element_ty), mask=columns < K)


@triton.jit(do_not_specialize=["M"])
def dual_dgrad_small(
    dgate_up_ptr,
    wg_ptr,
    wu_ptr,
    dx_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    wg_stride,
    wu_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dX = dGate Wg + dUp Wu``, split-K as in :func:`linear_small`: each program takes its share of both sums.

    dgate_up [M, 2K] and dx [M, N] contiguous; wg and wu [K, N] with their row strides. Without wu: dGate [M, K] alone.
    """
    WIDTH: tl.constexpr = 1 if wu_ptr is None else 2
    tiles_m = tl.cdiv(M, BLOCK_M)
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    tokens = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    first = split * share
    last = tl.minimum(K, first + share)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # fmt: off
    acc = _across(acc, dgate_up_ptr, WIDTH * K, wg_ptr, wg_stride, tokens, features, first, last, M, N, K,
                  BLOCK_K, PRECISION)
    if wu_ptr is not None:
        acc = _across(acc, dgate_up_ptr + K, 2 * K, wu_ptr, wu_stride, tokens, features, first, last, M, N, K,
                      BLOCK_K, PRECISION)
    at = tokens[None, :].to(tl.int64) * N + features[:, None]
    mask = (tokens[None, :] < M) & (features[:, None] < N)
    share_sum(acc, partial_ptr, counter_ptr, dx_ptr, dx_ptr, dx_ptr, split, tile, features, at, mask, M, N,
              SPLITS, "identity", False, False, False)
    # fmt: on


@triton.jit
def _across(
    acc,
    x_ptr,
    x_stride,
    w_ptr,
    w_stride,
    tokens,
    features,
    first,
    last,
    M,
    N,
    K,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc + W^T x^T`` over the rows of W [K, N], and columns of x, from ``first`` to ``last``."""
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tokens[None, :].to(tl.int64) * x_stride + inner[:, None]
    w_at = w_ptr + (first + inner[None, :]).to(tl.int64) * w_stride + features[:, None]
    for k in range(first, last, BLOCK_K):
        w = tl.load(w_at, mask=(features[:, None] < N) & (inner[None, :] < K - k), other=0.0)
        x = tl.load(x_at + k, mask=(tokens[None, :] < M) & (inner[:, None] < K - k), other=0.0)
        acc = dot(w, x, acc, PRECISION)
        w_at += tl.cast(BLOCK_K, tl.int64) * w_stride
    return acc
