"""Backward to the hidden layer, warp-specialised: dH = dY W, and what comes before it in the epilogue.

Gated: dGate, dUp and the hidden activation again, from gate and up. Two-layer: dPre, and the activation again where its
input was kept, from what the activation keeps ("gate" below).

One warp loads the operands of the product, one more for each of two warpgroups the gate and up chunks that its epilogue
will need. The warpgroups take tiles in turns, so that the epilogue of one, which is memory traffic, runs under the
products of the other. A chunk's dGate and dUp take the place of its gate and up in shared memory and leave from there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..activations import activate_grad, grad_through, times_derivative
from ..common import round_as_stored
from .column_sums import barrier, finish_column_sums, partial_column_sums, store_band_sums
from .common import (
    async_load,
    async_store,
    column_halves,
    column_parts,
    finish,
    load_operands,
    multiply,
    new_barriers,
    pass_turn,
    release,
    row_halves,
    take_turn,
    tile_of,
    wait_empty,
    wait_full,
)


@gluon.jit
def bands_of(row, M, BLOCK_M: gl.constexpr, ROWS: gl.constexpr):
    """Bands of ROWS rows in the tile from ``row`` on, without those wholly below M."""
    return gl.minimum(gl.cdiv(M - row, ROWS), BLOCK_M // ROWS)


@gluon.jit
def _load_chunks(
    gate_desc,
    up_desc,
    bufs,
    full,
    empty,
    M,
    H,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    WHO: gl.constexpr,
):
    """Gate and up of the tiles of warpgroup WHO, in the order in which its epilogue takes them."""
    ROWS: gl.constexpr = gate_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = gate_desc.block_type.shape[1]
    ACROSS: gl.constexpr = BLOCK_N // COLUMNS
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(H, BLOCK_N)
    programs = gl.num_programs(0)
    i = 0
    for tile in range(gl.program_id(0) + WHO * programs, tiles_m * tiles_n, 2 * programs):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        for c in range(bands_of(pid_m * BLOCK_M, M, BLOCK_M, ROWS) * ACROSS):
            row = pid_m * BLOCK_M + (c // ACROSS) * ROWS
            column = pid_n * BLOCK_N + (c % ACROSS) * COLUMNS
            wait_empty(empty, i, SLOTS)
            bar = full.index(i % SLOTS)
            slot = bufs.index(i % SLOTS)
            if up_desc is None:
                mbarrier.expect(bar, gate_desc.block_type.nbytes)
            else:
                mbarrier.expect(bar, gate_desc.block_type.nbytes + up_desc.block_type.nbytes)
                async_load(up_desc, [row, column], bar, slot.slice(ROWS, ROWS))
            async_load(gate_desc, [row, column], bar, slot.slice(0, ROWS))
            i += 1


@gluon.jit
def _chunk(
    dh,
    dgate_desc,
    dup_desc,
    h_desc,
    bufs,
    h_bufs,
    full,
    empty,
    gate_sum_ptr,
    up_sum_ptr,
    M,
    H,
    i,
    first,
    row,
    column,
    SLOTS: gl.constexpr,
    ACT: gl.constexpr,
    SAVES_OUTPUT: gl.constexpr,
    STORE_H: gl.constexpr,
    BIAS_GRAD: gl.constexpr,
    FAST_MATH: gl.constexpr,
):
    """The epilogue of one chunk, the warpgroup's ``i``-th; ``first``: the number of its tile's first one, before which
    no slot waits to be given back."""
    LAG: gl.constexpr = h_bufs.shape[0]
    STORES: gl.constexpr = (1 if dup_desc is None else 2) + (1 if STORE_H else 0)
    ROWS: gl.constexpr = h_desc.block_type.shape[0]
    DTYPE: gl.constexpr = h_desc.dtype
    wait_full(full, i, SLOTS)
    slot = bufs.index(i % SLOTS)
    gate = slot.slice(0, ROWS).load(dh.type.layout).to(gl.float32)
    dh = round_as_stored(dh, DTYPE)
    if dup_desc is None:
        dgate, h = grad_through(dh, gate, ACT, SAVES_OUTPUT, FAST_MATH)
        h = h.to(DTYPE)
        dup = dgate
    else:
        up = slot.slice(ROWS, ROWS).load(dh.type.layout).to(gl.float32)
        a, d = activate_grad(gate, ACT, FAST_MATH)
        a = round_as_stored(a, DTYPE)
        h = (a * up).to(DTYPE)
        dgate = times_derivative(round_as_stored(dh * up, DTYPE), d, ACT)
        dup = dh * a
    if BIAS_GRAD:
        store_band_sums(dgate, gate_sum_ptr, row, column, M, H)
    dgate = dgate.to(DTYPE)  # before the next sums, for the sake of registers
    if BIAS_GRAD and dup_desc is not None:
        store_band_sums(dup, up_sum_ptr, row, column, M, H)
    # The stores of the chunk LAG before have read its slot and its buffer of h.
    tma.store_wait((LAG - 1) * STORES)
    release(empty, i + SLOTS - LAG, SLOTS, pred=i >= first + LAG)
    h_buf = h_bufs.index(i % LAG)
    slot.slice(0, ROWS).store(dgate)
    if dup_desc is not None:
        slot.slice(ROWS, ROWS).store(dup.to(DTYPE))
    if STORE_H:
        h_buf.store(h)
    fence_async_shared()
    async_store(dgate_desc, [row, column], slot.slice(0, ROWS))
    if dup_desc is not None:
        async_store(dup_desc, [row, column], slot.slice(ROWS, ROWS))
    if STORE_H:
        async_store(h_desc, [row, column], h_buf)


@gluon.jit
def _band(
    dh,
    dgate_desc,
    dup_desc,
    h_desc,
    bufs,
    h_bufs,
    full,
    empty,
    gate_sum_ptr,
    up_sum_ptr,
    M,
    H,
    i,
    first,
    row,
    column,
    WIDTH: gl.constexpr,
    SLOTS: gl.constexpr,
    ACT: gl.constexpr,
    SAVES_OUTPUT: gl.constexpr,
    STORE_H: gl.constexpr,
    BIAS_GRAD: gl.constexpr,
    FAST_MATH: gl.constexpr,
):
    """All chunks of dh [chunk rows, WIDTH], left to right; returns the number of the next chunk."""
    ROWS: gl.constexpr = h_desc.block_type.shape[0]
    # fmt: off
    if WIDTH == h_desc.block_type.shape[1]:
        _chunk(dh, dgate_desc, dup_desc, h_desc, bufs, h_bufs, full, empty, gate_sum_ptr, up_sum_ptr, M, H,
               i, first, row, column, SLOTS, ACT, SAVES_OUTPUT, STORE_H, BIAS_GRAD, FAST_MATH)
        i += 1
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = column_halves(dh, ROWS, HALF)
        i = _band(left, dgate_desc, dup_desc, h_desc, bufs, h_bufs, full, empty, gate_sum_ptr, up_sum_ptr, M, H,
                  i, first, row, column, HALF, SLOTS, ACT, SAVES_OUTPUT, STORE_H, BIAS_GRAD, FAST_MATH)
        i = _band(right, dgate_desc, dup_desc, h_desc, bufs, h_bufs, full, empty, gate_sum_ptr, up_sum_ptr, M, H,
                  i, first, row, column + HALF, HALF, SLOTS, ACT, SAVES_OUTPUT, STORE_H, BIAS_GRAD, FAST_MATH)
    # fmt: on
    return i


@gluon.jit
def _consume(
    dgate_desc,
    dup_desc,
    h_desc,
    a_bufs,
    b_bufs,
    full,
    empty,
    turns,
    bufs,
    h_bufs,
    chunk_full,
    chunk_empty,
    gate_sum_ptr,
    up_sum_ptr,
    M,
    H,
    K,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    ACT: gl.constexpr,
    SAVES_OUTPUT: gl.constexpr,
    STORE_H: gl.constexpr,
    BIAS_GRAD: gl.constexpr,
    FAST_MATH: gl.constexpr,
    WHO: gl.constexpr,
):
    """Warpgroup WHO: every second tile of the program, the product and then its epilogue."""
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    BLOCK_N: gl.constexpr = b_bufs.shape[2]
    ROWS: gl.constexpr = h_desc.block_type.shape[0]
    LAG: gl.constexpr = h_bufs.shape[0]
    PIECE: gl.constexpr = max(BLOCK_N // 2, h_desc.block_type.shape[1])  # columns that the code of an epilogue covers
    ACROSS: gl.constexpr = BLOCK_N // PIECE
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(H, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    programs = gl.num_programs(0)
    step = WHO * steps  # of the ring that both warpgroups share, in tile order
    own_tile = 0
    i = 0
    for tile in range(gl.program_id(0) + WHO * programs, tiles_m * tiles_n, 2 * programs):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        take_turn(turns, own_tile, WHO)
        acc = multiply(acc, a_bufs, b_bufs, full, empty, step, steps, STAGES, False)
        pass_turn(turns, WHO)
        acc = finish(acc, empty, step + steps, STAGES)
        first = i
        # A loop, though it moves registers: a whole epilogue in a row, twice, is more code than the instruction cache
        # holds, and the warpgroups would wait for instructions a fifth of the time.
        pieces = ACROSS * bands_of(row, M, BLOCK_M, ROWS)
        if ROWS == BLOCK_M:
            p0, p1, p2, p3 = column_parts(acc, BLOCK_M, PIECE)
        else:
            gl.static_assert(2 * ROWS == BLOCK_M)
            upper, lower = row_halves(acc, ROWS, BLOCK_N)
            p0, p1, _, _ = column_parts(upper, ROWS, PIECE)
            p2, p3, _, _ = column_parts(lower, ROWS, PIECE)
            if ACROSS == 1:
                p1 = p2
        for piece in range(pieces):
            # fmt: off
            i = _band(p0, dgate_desc, dup_desc, h_desc, bufs, h_bufs, chunk_full, chunk_empty, gate_sum_ptr, up_sum_ptr,
                      M, H, i, first, row + piece // ACROSS * ROWS, column + piece % ACROSS * PIECE, PIECE, SLOTS, ACT,
                      SAVES_OUTPUT, STORE_H, BIAS_GRAD, FAST_MATH)
            # fmt: on
            p0 = p1
            p1 = p2
            p2 = p3
        tma.store_wait(0)
        for k in gl.static_range(LAG):
            release(chunk_empty, i + SLOTS - LAG + k, SLOTS, pred=i - LAG + k >= first)
        step += 2 * steps
        own_tile += 1


@gluon.jit(do_not_specialize=["M", "gy_parts"])
def hidden_backward_gluon(
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
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    ACT: gl.constexpr,
    SAVES_OUTPUT: gl.constexpr,
    STORE_H: gl.constexpr,
    BIAS_GRAD: gl.constexpr,
    DOWN_BIAS_GRAD: gl.constexpr,
    FAST_MATH: gl.constexpr,
):
    """Persistent, 4 warps (12 with the specialised ones). gy [M, K] box [BLOCK_M, BLOCK_K], w = Wd [K, H] box
    [BLOCK_K, BLOCK_N]; gate, up, dgate, dup, h [M, H] box [chunk rows, chunk columns], rows BLOCK_M or half of it.
    Two-layer: gate is what the activation keeps, dgate its gradient, h the activation; what belongs to up is None.
    gate_sum, up_sum: fp32 [bands, H], a band the rows of a chunk, for all bands of all tiles; gy_sum: fp32 [gy_parts,
    K]. With bias gradients the grid must be co-resident."""
    BLOCK_M: gl.constexpr = gy_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1]
    ROWS: gl.constexpr = gate_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = gate_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(gy_desc.dtype, [STAGES] + gy_desc.block_type.shape, gy_desc.layout)
    b_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 1)
    turns = new_barriers(2, 1)
    CHUNKS: gl.constexpr = 1 if up_desc is None else 2
    bufs0 = gl.allocate_shared_memory(gate_desc.dtype, [SLOTS, CHUNKS * ROWS, COLUMNS], gate_desc.layout)
    bufs1 = gl.allocate_shared_memory(gate_desc.dtype, [SLOTS, CHUNKS * ROWS, COLUMNS], gate_desc.layout)
    LAG: gl.constexpr = 2 if SLOTS > 2 else 1  # chunks whose stores may be under way
    h0 = gl.allocate_shared_memory(h_desc.dtype, [LAG] + h_desc.block_type.shape, h_desc.layout)
    h1 = gl.allocate_shared_memory(h_desc.dtype, [LAG] + h_desc.block_type.shape, h_desc.layout)
    full0 = new_barriers(SLOTS, 1)
    full1 = new_barriers(SLOTS, 1)
    empty0 = new_barriers(SLOTS, 1)
    empty1 = new_barriers(SLOTS, 1)
    fence_async_shared()  # the barriers are seen by TMA
    # fmt: off
    gl.warp_specialize([
        (_consume, (dgate_desc, dup_desc, h_desc, a_bufs, b_bufs, full, empty, turns, bufs0, h0, full0, empty0,
                    gate_sum_ptr, up_sum_ptr, M, H, K, STAGES, SLOTS, GROUP, ACT, SAVES_OUTPUT, STORE_H,
                    BIAS_GRAD, FAST_MATH, 0)),
        (_consume, (dgate_desc, dup_desc, h_desc, a_bufs, b_bufs, full, empty, turns, bufs1, h1, full1, empty1,
                    gate_sum_ptr, up_sum_ptr, M, H, K, STAGES, SLOTS, GROUP, ACT, SAVES_OUTPUT, STORE_H,
                    BIAS_GRAD, FAST_MATH, 1)),
        (load_operands, (gy_desc, w_desc, a_bufs, b_bufs, full, empty, M, H, K, STAGES, GROUP)),
        (_load_chunks, (gate_desc, up_desc, bufs0, full0, empty0, M, H, BLOCK_M, BLOCK_N, SLOTS, GROUP, 0)),
        (_load_chunks, (gate_desc, up_desc, bufs1, full1, empty1, M, H, BLOCK_M, BLOCK_N, SLOTS, GROUP, 1)),
    ], [4, 1, 1, 1], [232, 40, 40, 40])
    # fmt: on
    if BIAS_GRAD or DOWN_BIAS_GRAD:
        if DOWN_BIAS_GRAD:
            partial_column_sums(gy_ptr, gy_sum_ptr, M, K, gy_parts, 32, 64)
        barrier(counter_ptr)
        if BIAS_GRAD:
            bands = gl.cdiv(M, ROWS)
            finish_column_sums(gate_sum_ptr, dbg_ptr, bands, H, 32, 64)
            if up_desc is not None:
                finish_column_sums(up_sum_ptr, dbu_ptr, bands, H, 32, 64)
        if DOWN_BIAS_GRAD:
            finish_column_sums(gy_sum_ptr, dbd_ptr, gy_parts, K, 32, 64)
