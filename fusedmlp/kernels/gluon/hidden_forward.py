"""Forward to the hidden layer, warp-specialised: the product, biases and the activation in its epilogue.

Gated: gate and up are one product over both weights, which lie one under the other in shared memory. A layer alone has
one weight ("gate" below). One warp loads the operands. PINGPONG: two warpgroups take tiles
in turns, so that the epilogue of one runs under the products of the other. Otherwise eight warps share each tile, which
may then be twice as large: more reuse of operands, for long products whose epilogue matters little.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..activations import activate
from ..common import round_as_stored
from .common import (
    async_load,
    column_halves,
    column_parts,
    finish,
    multiply,
    new_barriers,
    pass_turn,
    put,
    take_turn,
    tile_of,
    wait_empty,
)


@gluon.jit
def _load_operands(
    x_desc, gate_desc, up_desc, a_bufs, b_bufs, full, empty, M, H, K, STAGES: gl.constexpr, GROUP: gl.constexpr
):
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = gate_desc.block_type.shape[0]
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(H, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        for k in range(steps):
            wait_empty(empty, i, STAGES)
            bar = full.index(i % STAGES)
            b = b_bufs.index(i % STAGES)
            if up_desc is None:
                mbarrier.expect(bar, x_desc.block_type.nbytes + gate_desc.block_type.nbytes)
            else:
                mbarrier.expect(bar, x_desc.block_type.nbytes + 2 * gate_desc.block_type.nbytes)
                async_load(up_desc, [pid_n * BLOCK_N, k * BLOCK_K], bar, b.slice(BLOCK_N, BLOCK_N))
            async_load(x_desc, [pid_m * BLOCK_M, k * BLOCK_K], bar, a_bufs.index(i % STAGES))
            async_load(gate_desc, [pid_n * BLOCK_N, k * BLOCK_K], bar, b.slice(0, BLOCK_N))
            i += 1


@gluon.jit
def _add_bias(x, bias_ptr, column, H, COLUMNS: gl.constexpr):
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, x.type.layout))
    bias = gl.load(bias_ptr + columns, mask=columns < H, other=0.0)
    return x + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def _part(
    gate,
    up,
    gate_bias_ptr,
    up_bias_ptr,
    h_desc,
    g_desc,
    u_desc,
    outs,
    out,
    row,
    column,
    H,
    BUFFERS: gl.constexpr,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    SAVE: gl.constexpr,
    STORE_H: gl.constexpr,
    FAST_MATH: gl.constexpr,
):
    """The epilogue of a store's columns of a tile; returns the number of the next store."""
    DTYPE: gl.constexpr = h_desc.dtype
    COLUMNS: gl.constexpr = h_desc.block_type.shape[1]
    if gate_bias_ptr is not None:
        gate = _add_bias(gate, gate_bias_ptr, column, H, COLUMNS)
    gate = gate.to(DTYPE)  # rounded first, as eager does: backward starts from the same values
    if SAVE:
        out = put(gate, g_desc, outs, out, row, column, BUFFERS)
    if GATED:
        if up_bias_ptr is not None:
            up = _add_bias(up, up_bias_ptr, column, H, COLUMNS)
        up = up.to(DTYPE)
        if SAVE:
            out = put(up, u_desc, outs, out, row, column, BUFFERS)
    if STORE_H:
        h = activate(gate.to(gl.float32), ACT, FAST_MATH)
        if GATED:
            h = round_as_stored(h, DTYPE) * up.to(gl.float32)
        out = put(h, h_desc, outs, out, row, column, BUFFERS)
    return out


@gluon.jit
def _consume(
    gate_bias_ptr,
    up_bias_ptr,
    h_desc,
    g_desc,
    u_desc,
    a_bufs,
    b_bufs,
    full,
    empty,
    turns,
    outs,
    M,
    H,
    K,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP: gl.constexpr,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    SAVE: gl.constexpr,
    STORE_H: gl.constexpr,
    FAST_MATH: gl.constexpr,
    WHO: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Consumer WHO of CONSUMERS: its share of the program's tiles, the product and then its epilogue."""
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    WIDTH: gl.constexpr = b_bufs.shape[1]
    BLOCK_N: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    PART: gl.constexpr = h_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDTH, 16]
    )
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(H, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    programs = gl.num_programs(0)
    step = WHO * steps
    own_tile = 0
    out = 0
    for tile in range(gl.program_id(0) + WHO * programs, tiles_m * tiles_n, CONSUMERS * programs):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        acc = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout)
        if CONSUMERS == 2:
            take_turn(turns, own_tile, WHO)
        acc = multiply(acc, a_bufs, b_bufs, full, empty, step, steps, STAGES, True)
        if CONSUMERS == 2:
            pass_turn(turns, WHO)
        acc = finish(acc, empty, step + steps, STAGES)
        if GATED:
            gate, up = column_halves(acc, BLOCK_M, BLOCK_N)
        else:
            gate, up = acc, acc
        # fmt: off
        if PART == BLOCK_N:
            out = _part(gate, up, gate_bias_ptr, up_bias_ptr, h_desc, g_desc, u_desc, outs, out, row, column, H,
                        BUFFERS, ACT, GATED, SAVE, STORE_H, FAST_MATH)
        else:
            # A loop, though it moves registers: the parts in a row are more code than the instruction cache holds, and
            # the compiler, which mixes them, would need more registers than there are.
            g0, g1, g2, g3 = column_parts(gate, BLOCK_M, PART)
            u0, u1, u2, u3 = column_parts(up, BLOCK_M, PART)
            for part in range(gl.minimum(gl.cdiv(H - column, PART), BLOCK_N // PART)):
                out = _part(g0, u0, gate_bias_ptr, up_bias_ptr, h_desc, g_desc, u_desc, outs, out, row,
                            column + part * PART, H, BUFFERS, ACT, GATED, SAVE, STORE_H, FAST_MATH)
                g0, g1, g2 = g1, g2, g3
                u0, u1, u2 = u1, u2, u3
        # fmt: on
        step += CONSUMERS * steps
        own_tile += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def hidden_forward_gluon(
    x_desc,
    gate_desc,
    up_desc,
    gate_bias_ptr,
    up_bias_ptr,
    h_desc,
    g_desc,
    u_desc,
    M,
    H,
    K,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP: gl.constexpr,
    ACT: gl.constexpr,
    SAVE: gl.constexpr,
    STORE_H: gl.constexpr,
    FAST_MATH: gl.constexpr,
    PINGPONG: gl.constexpr,
):
    """Persistent; 4 warps with PINGPONG, else 8 (12 with the specialised ones). x [M, K] box [BLOCK_M, BLOCK_K]; gate
    and up weight [H, K] box [BLOCK_N, BLOCK_K]; h, and g, u (what is kept for backward) [M, H] box [BLOCK_M, columns],
    columns BLOCK_N or a part of it; biases [H] or None. A layer alone: up_desc, up_bias_ptr and u_desc are None."""
    BLOCK_N: gl.constexpr = gate_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = gate_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    GATED: gl.constexpr = up_desc is not None
    WIDTH: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    b_bufs = gl.allocate_shared_memory(gate_desc.dtype, [STAGES, WIDTH, BLOCK_K], gate_desc.layout)
    outs0 = gl.allocate_shared_memory(h_desc.dtype, [BUFFERS] + h_desc.block_type.shape, h_desc.layout)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 1)
    turns = new_barriers(2, 1)
    fence_async_shared()  # the barriers are seen by TMA
    # fmt: off
    if PINGPONG:
        outs1 = gl.allocate_shared_memory(h_desc.dtype, [BUFFERS] + h_desc.block_type.shape, h_desc.layout)
        gl.warp_specialize([
            (_consume, (gate_bias_ptr, up_bias_ptr, h_desc, g_desc, u_desc, a_bufs, b_bufs, full, empty, turns, outs0,
                        M, H, K, STAGES, BUFFERS, GROUP, ACT, GATED, SAVE, STORE_H, FAST_MATH, 0, 2)),
            (_consume, (gate_bias_ptr, up_bias_ptr, h_desc, g_desc, u_desc, a_bufs, b_bufs, full, empty, turns, outs1,
                        M, H, K, STAGES, BUFFERS, GROUP, ACT, GATED, SAVE, STORE_H, FAST_MATH, 1, 2)),
            (_load_operands, (x_desc, gate_desc, up_desc, a_bufs, b_bufs, full, empty, M, H, K, STAGES, GROUP)),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (_consume, (gate_bias_ptr, up_bias_ptr, h_desc, g_desc, u_desc, a_bufs, b_bufs, full, empty, turns, outs0,
                        M, H, K, STAGES, BUFFERS, GROUP, ACT, GATED, SAVE, STORE_H, FAST_MATH, 0, 1)),
            (_load_operands, (x_desc, gate_desc, up_desc, a_bufs, b_bufs, full, empty, M, H, K, STAGES, GROUP)),
        ], [1], [40])
    # fmt: on
