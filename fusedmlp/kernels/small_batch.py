"""Products for small batches, where the time is that of reading the weights: each is streamed once.

The weight tile is the left operand of the product and x^T the right one, so that the tokens, padded to BLOCK_M, are
the short side of the instruction: 16 of them cost a quarter of the tensor cores' rows that they would on the left.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activations import activate
from .common import dot, round_as_stored


@triton.jit(do_not_specialize=["M"])
def glu_small(
    x_ptr,
    wg_ptr,
    wu_ptr,
    bg_ptr,
    bu_ptr,
    h_ptr,
    gate_up_ptr,
    M,
    H,
    K,
    x_stride,
    wg_stride,
    wu_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    SAVE_GATE_UP: tl.constexpr,
    STORE_H: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """``h = act(x Wg^T + bg) * (x Wu^T + bu)``, BLOCK_N rows of gate and of up a program.

    x [M, K], wg and wu [H, K] have their own row strides; h [M, H] and gate_up [M, 2H] are contiguous, gate in the
    first H columns. TRIGGER: a launch that waits for this one's end may be brought onto the multiprocessors meanwhile.
    """
    if TRIGGER:
        gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tokens = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tokens[None, :].to(tl.int64) * x_stride + inner[:, None]
    wg_at = wg_ptr + features[:, None].to(tl.int64) * wg_stride + inner[None, :]
    wu_at = wu_ptr + features[:, None].to(tl.int64) * wu_stride + inner[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        w_mask = (features[:, None] < H) & (inner[None, :] < K - k)
        wg = tl.load(wg_at + k, mask=w_mask, other=0.0)
        wu = tl.load(wu_at + k, mask=w_mask, other=0.0)
        x = tl.load(x_at + k, mask=(tokens[None, :] < M) & (inner[:, None] < K - k), other=0.0)
        gate = dot(wg, x, gate, PRECISION)
        up = dot(wu, x, up, PRECISION)
    if HAS_GATE_BIAS:
        gate += tl.load(bg_ptr + features, mask=features < H, other=0.0).to(tl.float32)[:, None]
    if HAS_UP_BIAS:
        up += tl.load(bu_ptr + features, mask=features < H, other=0.0).to(tl.float32)[:, None]
    gate = gate.to(x_ptr.dtype.element_ty)  # rounded first, as eager does: backward starts from the same values
    up = up.to(x_ptr.dtype.element_ty)
    mask = (tokens[None, :] < M) & (features[:, None] < H)
    if SAVE_GATE_UP:
        at = tokens[None, :].to(tl.int64) * (2 * H) + features[:, None]
        tl.store(gate_up_ptr + at, gate, mask=mask)
        tl.store(gate_up_ptr + at + H, up, mask=mask)
    if STORE_H:
        a = round_as_stored(activate(gate.to(tl.float32), ACT, FAST_MATH), x_ptr.dtype.element_ty)
        h = a * up.to(tl.float32)
        at = tokens[None, :].to(tl.int64) * H + features[:, None]
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def linear_small(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    pre_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """``y = act(x W^T + b)``, split-K: SPLITS programs share the sum behind an output tile.

    The program of a tile that arrives last adds the partial sums, always in the order of the splits, so that results
    repeat bit for bit whichever program that is. No program waits for another: the grid may have any size.

    x [M, K] and w [N, K] have their own row strides, y and pre [M, N] are contiguous. partial: fp32 [SPLITS, M, N];
    counter: an int32 a tile, zero before and after. Neither is touched with a single split.

    DEPENDENT: the launch starts before the kernel ahead of it has ended, and waits here for that. Fetching weights into
    L2 meanwhile made the kernel ahead slower than it helped. TRIGGER: a launch that waits for this one's end may be
    brought onto the multiprocessors meanwhile.
    """
    if TRIGGER:
        gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    tokens = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tokens[None, :].to(tl.int64) * x_stride + inner[:, None]
    w_at = w_ptr + features[:, None].to(tl.int64) * w_stride + inner[None, :]
    # Whole steps a split: each starts at a multiple of BLOCK_K, and only the last meets the ragged end of K.
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    first = split * share
    last = tl.minimum(K, first + share)
    if DEPENDENT:
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(first, last, BLOCK_K):
        w = tl.load(w_at + k, mask=(features[:, None] < N) & (inner[None, :] < K - k), other=0.0)
        x = tl.load(x_at + k, mask=(tokens[None, :] < M) & (inner[:, None] < K - k), other=0.0)
        acc = dot(w, x, acc, PRECISION)
    at = tokens[None, :].to(tl.int64) * N + features[:, None]
    mask = (tokens[None, :] < M) & (features[:, None] < N)
    # fmt: off
    share_sum(acc, partial_ptr, counter_ptr, b_ptr, y_ptr, pre_ptr, split, tile, features, at, mask, M, N,
              SPLITS, ACT, HAS_BIAS, SAVE_PRE, FAST_MATH)
    # fmt: on


@triton.jit
def share_sum(
    acc,
    partial_ptr,
    counter_ptr,
    b_ptr,
    y_ptr,
    pre_ptr,
    split,
    tile,
    features,
    at,
    mask,
    M,
    N,
    SPLITS: tl.constexpr,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """The end of a program: of SPLITS that share the sum behind a tile, the last to arrive adds them up."""
    if SPLITS == 1:
        _finish(acc, b_ptr, y_ptr, pre_ptr, features, at, mask, N, ACT, HAS_BIAS, SAVE_PRE, FAST_MATH)
    else:
        size = tl.cast(M, tl.int64) * N
        # .cg: partial sums pass between multiprocessors through L2, whose lines L1 may not have
        tl.store(partial_ptr + split * size + at, acc, mask=mask, cache_modifier=".cg")
        tl.debug_barrier()  # all threads' stores come before the release below
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.debug_barrier()
            total = tl.zeros_like(acc)
            for i in range(SPLITS):
                total += tl.load(partial_ptr + i * size + at, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(total, b_ptr, y_ptr, pre_ptr, features, at, mask, N, ACT, HAS_BIAS, SAVE_PRE, FAST_MATH)
            tl.atomic_xchg(counter_ptr + tile, 0, sem="relaxed", scope="gpu")  # for the next launch, or a replay


@triton.jit
def _finish(
    acc,
    b_ptr,
    y_ptr,
    pre_ptr,
    features,
    at,
    mask,
    N,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_PRE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    if HAS_BIAS:
        acc += tl.load(b_ptr + features, mask=features < N, other=0.0).to(tl.float32)[:, None]
    pre = acc.to(y_ptr.dtype.element_ty)  # rounded first, as eager does: backward starts from the same value
    if SAVE_PRE:
        tl.store(pre_ptr + at, pre, mask=mask)
    y = activate(pre.to(tl.float32), ACT, FAST_MATH)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
