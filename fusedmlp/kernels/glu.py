"""``h = act(x Wg^T + bg) * (x Wu^T + bu)`` in one kernel, optionally storing gate and up for backward."""

import triton
import triton.language as tl

from .activations import activate
from .common import dot, round_as_stored, tile_of


@triton.jit(do_not_specialize=["M"])
def glu_tma(
    x_desc,
    w_desc,
    bg_ptr,
    bu_ptr,
    h_desc,
    gate_desc,
    up_desc,
    M,
    H,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    SAVE_GATE_UP: tl.constexpr,
    STORE_H: tl.constexpr,
    UP_FIRST: tl.constexpr,
    FAST_MATH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Persistent. Both weights come through one 3-D descriptor [2, H, K], box [2, BLOCK_N, BLOCK_K], whose outer
    stride is the distance between them (UP_FIRST where ``up`` lies lower in memory): one request and one product of
    width 2 BLOCK_N a step. h, gate and up: boxes [BLOCK_M, BLOCK_N]; gate and up are the halves of [M, 2H], each
    with its own descriptor, so that a ragged last tile of gate cannot reach into up."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(H, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in range(steps):
            x = x_desc.load([row, k * BLOCK_K])
            w = tl.reshape(w_desc.load([0, col, k * BLOCK_K]), (2 * BLOCK_N, BLOCK_K))
            acc = tl.dot(x, w.T, acc)
        first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        if UP_FIRST:
            gate, up = second, first
        else:
            gate, up = first, second
        columns = col + tl.arange(0, BLOCK_N)
        if HAS_GATE_BIAS:
            gate += tl.load(bg_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
        if HAS_UP_BIAS:
            up += tl.load(bu_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
        gate = gate.to(h_desc.dtype)  # rounded first, as eager does: backward starts from the same values
        up = up.to(h_desc.dtype)
        if SAVE_GATE_UP:
            gate_desc.store([row, col], gate)
            up_desc.store([row, col], up)
        if STORE_H:
            a = round_as_stored(activate(gate.to(tl.float32), ACT, FAST_MATH), h_desc.dtype)
            h_desc.store([row, col], (a * up.to(tl.float32)).to(h_desc.dtype))


@triton.jit(do_not_specialize=["M"])
def glu_pointer(
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
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    SAVE_GATE_UP: tl.constexpr,
    STORE_H: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile a program; x [M, K], wg and wu [H, K] have their own row strides; h [M, H] and gate_up [M, 2H] are
    contiguous, gate in the first H columns."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(H, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows[:, None].to(tl.int64) * x_stride + inner[None, :]
    wg_at = wg_ptr + columns[None, :].to(tl.int64) * wg_stride + inner[:, None]
    wu_at = wu_ptr + columns[None, :].to(tl.int64) * wu_stride + inner[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        w_mask = (columns[None, :] < H) & (inner[:, None] < K - k)
        x = tl.load(x_at + k, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
        wg = tl.load(wg_at + k, mask=w_mask, other=0.0)
        wu = tl.load(wu_at + k, mask=w_mask, other=0.0)
        gate = dot(x, wg, gate, PRECISION)
        up = dot(x, wu, up, PRECISION)
    if HAS_GATE_BIAS:
        gate += tl.load(bg_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    if HAS_UP_BIAS:
        up += tl.load(bu_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    gate = gate.to(x_ptr.dtype.element_ty)
    up = up.to(x_ptr.dtype.element_ty)
    mask = (rows[:, None] < M) & (columns[None, :] < H)
    if SAVE_GATE_UP:
        at = rows[:, None].to(tl.int64) * (2 * H) + columns[None, :]
        tl.store(gate_up_ptr + at, gate, mask=mask)
        tl.store(gate_up_ptr + at + H, up, mask=mask)
    if STORE_H:
        a = round_as_stored(activate(gate.to(tl.float32), ACT, FAST_MATH), x_ptr.dtype.element_ty)
        h = a * up.to(tl.float32)
        at = rows[:, None].to(tl.int64) * H + columns[None, :]
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=mask)
