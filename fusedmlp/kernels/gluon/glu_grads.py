"""The three products that follow the gated backward's hidden kernel, in one persistent launch, warp-specialised.

dX = dGate Wg + dUp Wu is one sum over 2 H; dWgate = dGate^T x, dWup = dUp^T x and dWdown = gy^T h are sums over M. At
some thousand tokens none of them fills the multiprocessors evenly; together they do. Long sums go first, one program
after another, and programs with one of them fewer take short ones until they are level. That is the greedy schedule for
two lengths, in closed form: programs agree on it without a table and without a counter in memory. Tiles dealt out in
turns would leave those with a dX tile far behind: it may be six times as long as a dW tile.

One warp loads, two warpgroups take the program's tiles in turns, and both count the steps of all of them, since the
ring is one. Gate and up have descriptors of their own: a ragged tile of one cannot reach into the other.

An MLP of two layers has the same three products: gate and up are then the halves of its one hidden layer, H wide each,
and only h is as wide as both (H_DOWN).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .common import (
    async_load,
    async_store,
    column_halves,
    finish,
    multiply,
    new_barriers,
    pass_turn,
    take_turn,
    tile_of,
    wait_empty,
)


@gluon.jit
def _shares(
    M,
    H,
    D,
    D_OUT,
    H_DOWN,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    NEED_DOWN: gl.constexpr,
):
    """What this program does: the number of its tiles, and what :func:`_nth` has to know."""
    x_steps = 2 * gl.cdiv(H, BLOCK_K)
    w_steps = gl.cdiv(M, BLOCK_K)
    x_tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(D, BLOCK_N) * NEED_X
    w_tiles = 2 * gl.cdiv(H, BLOCK_M) * gl.cdiv(D, BLOCK_N) * NEED_GATE_UP
    w_tiles += gl.cdiv(D_OUT, BLOCK_M) * gl.cdiv(H_DOWN, BLOCK_N) * NEED_DOWN
    x_is_long = x_steps >= w_steps
    longs = x_tiles
    shorts = w_tiles
    long_steps = x_steps
    short_steps = w_steps
    if not x_is_long:
        longs = w_tiles
        shorts = x_tiles
        long_steps = w_steps
        short_steps = x_steps
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    ahead = longs % programs  # the first programs, which have one long tile more than the others
    behind = programs - ahead
    rank = (program + behind) % programs  # those behind come first
    own_longs = (longs + programs - 1 - program) // programs
    catching_up = gl.minimum(shorts, behind * (long_steps // short_steps))
    own_catching_up = catching_up * 0
    if rank < behind:
        own_catching_up = (catching_up + behind - 1 - rank) // behind
    own_rest = (shorts - catching_up + programs - 1 - rank) // programs
    own = own_longs + own_catching_up + own_rest
    return own, (x_is_long, own_longs, own_catching_up, catching_up, behind, rank, long_steps, short_steps)


@gluon.jit
def _nth(
    j,
    shares,
    M,
    H,
    D,
    D_OUT,
    H_DOWN,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The program's tile ``j``: its product (0 dX, 1 dWgate, 2 dWup, 3 dWdown), row and column, first step and steps.

    The steps are those of the ring, which both warpgroups share: each counts the tiles of the other as well.
    """
    x_is_long, own_longs, own_catching_up, catching_up, behind, rank, long_steps, short_steps = shares
    programs = gl.num_programs(0)
    if j < own_longs:
        tile = gl.program_id(0) + j * programs
        first = j * long_steps
        steps = long_steps
        is_x = x_is_long
    else:
        s = j - own_longs
        if s < own_catching_up:
            tile = rank + s * behind
        else:
            tile = catching_up + rank + (s - own_catching_up) * programs
        first = own_longs * long_steps + s * short_steps
        steps = short_steps
        is_x = not x_is_long
    tiles_d = gl.cdiv(D, BLOCK_N)
    gate_tiles = gl.cdiv(H, BLOCK_M) * tiles_d * NEED_GATE_UP
    if is_x:
        product = 0
        tiles_m = gl.cdiv(M, BLOCK_M)
        tiles_n = tiles_d
    else:
        if tile < 2 * gate_tiles:
            product = 1 + tile // gate_tiles
            tile = tile % gate_tiles
            tiles_m = gl.cdiv(H, BLOCK_M)
            tiles_n = tiles_d
        else:
            product = 3
            tile = tile - 2 * gate_tiles
            tiles_m = gl.cdiv(D_OUT, BLOCK_M)
            tiles_n = gl.cdiv(H_DOWN, BLOCK_N)
    row, column = tile_of(tile, tiles_m, tiles_n, GROUP)
    return product, row * BLOCK_M, column * BLOCK_N, first, steps


@gluon.jit
def _load_product(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, i, steps, row, column, STAGES: gl.constexpr, COLUMNS_OF_A: gl.constexpr
):
    """One sum's operands, from step ``i`` of the ring on. COLUMNS_OF_A: a lies as [BLOCK_K, BLOCK_M]."""
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[0]
    for k in range(steps):
        wait_empty(empty, i + k, STAGES)
        stage = (i + k) % STAGES
        bar = full.index(stage)
        mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        if COLUMNS_OF_A:
            async_load(a_desc, [k * BLOCK_K, row], bar, a_bufs.index(stage))
        else:
            async_load(a_desc, [row, k * BLOCK_K], bar, a_bufs.index(stage))
        async_load(b_desc, [k * BLOCK_K, column], bar, b_bufs.index(stage))


@gluon.jit
def _load_operands(
    dgate_desc,
    dup_desc,
    gate_desc,
    up_desc,
    dgate_t_desc,
    dup_t_desc,
    x_desc,
    gy_t_desc,
    h_desc,
    a_bufs,
    a_t_bufs,
    b_bufs,
    full,
    empty,
    M,
    H,
    D,
    D_OUT,
    H_DOWN,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    NEED_DOWN: gl.constexpr,
):
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = b_bufs.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.shape[2]
    # fmt: off
    own, shares = _shares(M, H, D, D_OUT, H_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, NEED_X, NEED_GATE_UP, NEED_DOWN)
    for j in range(own):
        product, row, column, i, steps = _nth(j, shares, M, H, D, D_OUT, H_DOWN, BLOCK_M, BLOCK_N, NEED_GATE_UP, GROUP)
        if NEED_X:
            if product == 0:
                half = steps // 2
                _load_product(dgate_desc, gate_desc, a_bufs, b_bufs, full, empty, i, half, row, column, STAGES, False)
                _load_product(dup_desc, up_desc, a_bufs, b_bufs, full, empty, i + half, half, row, column, STAGES,
                              False)
        if NEED_GATE_UP:
            if product == 1:
                _load_product(dgate_t_desc, x_desc, a_t_bufs, b_bufs, full, empty, i, steps, row, column, STAGES, True)
            if product == 2:
                _load_product(dup_t_desc, x_desc, a_t_bufs, b_bufs, full, empty, i, steps, row, column, STAGES, True)
        if NEED_DOWN:
            if product == 3:
                _load_product(gy_t_desc, h_desc, a_t_bufs, b_bufs, full, empty, i, steps, row, column, STAGES, True)
    # fmt: on


@gluon.jit
def _store(
    value,
    results,
    outs,
    out,
    product,
    row,
    column,
    BUFFERS: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    NEED_DOWN: gl.constexpr,
):
    """Some columns of a tile to the product that it belongs to; returns the number of the next store."""
    dx_desc, dgate_weight_desc, dup_weight_desc, ddown_weight_desc = results
    tma.store_wait(BUFFERS - 1)
    buf = outs.index(out % BUFFERS)
    buf.store(value.to(outs.dtype))
    fence_async_shared()
    if NEED_X:
        async_store(dx_desc, [row, column], buf)
    if NEED_GATE_UP:
        if product == 1:
            async_store(dgate_weight_desc, [row, column], buf)
        if product == 2:
            async_store(dup_weight_desc, [row, column], buf)
    if NEED_DOWN:
        if product == 3:
            async_store(ddown_weight_desc, [row, column], buf)
    return out + 1


@gluon.jit
def _tile(
    results,
    a_bufs,
    b_bufs,
    full,
    empty,
    turns,
    outs,
    out,
    product,
    row,
    column,
    first,
    steps,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    NEED_DOWN: gl.constexpr,
    WHO: gl.constexpr,
):
    """A tile from its turn to its stores, of dX (NEED_X) or of one of the others; returns the number of the next store.

    The accumulator does not leave this function: where branches with products meet, ptxas would serialise them.
    """
    COLUMNS_OF_A: gl.constexpr = not NEED_X
    BLOCK_M: gl.constexpr = a_bufs.shape[2] if COLUMNS_OF_A else a_bufs.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.shape[2]
    COLUMNS: gl.constexpr = outs.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    acc = multiply(acc, a_bufs, b_bufs, full, empty, first, steps, STAGES, False, COLUMNS_OF_A)
    pass_turn(turns, WHO)
    acc = finish(acc, empty, first + steps, STAGES)
    # fmt: off
    if COLUMNS == BLOCK_N:
        out = _store(acc, results, outs, out, product, row, column, BUFFERS, NEED_X, NEED_GATE_UP, NEED_DOWN)
    else:
        gl.static_assert(2 * COLUMNS == BLOCK_N)
        left, right = column_halves(acc, BLOCK_M, COLUMNS)
        out = _store(left, results, outs, out, product, row, column, BUFFERS, NEED_X, NEED_GATE_UP, NEED_DOWN)
        out = _store(right, results, outs, out, product, row, column + COLUMNS, BUFFERS, NEED_X, NEED_GATE_UP,
                     NEED_DOWN)
    # fmt: on
    return out


@gluon.jit
def _consume(
    dx_desc,
    dgate_weight_desc,
    dup_weight_desc,
    ddown_weight_desc,
    a_bufs,
    a_t_bufs,
    b_bufs,
    full,
    empty,
    turns,
    outs,
    M,
    H,
    D,
    D_OUT,
    H_DOWN,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    NEED_DOWN: gl.constexpr,
    WHO: gl.constexpr,
):
    """Warpgroup WHO: every second tile of the program, whatever product it is of."""
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = b_bufs.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.shape[2]
    results = (dx_desc, dgate_weight_desc, dup_weight_desc, ddown_weight_desc)
    # fmt: off
    own, shares = _shares(M, H, D, D_OUT, H_DOWN, BLOCK_M, BLOCK_N, BLOCK_K, NEED_X, NEED_GATE_UP, NEED_DOWN)
    out = 0
    for j in range(WHO, own, 2):
        product, row, column, first, steps = _nth(j, shares, M, H, D, D_OUT, H_DOWN, BLOCK_M, BLOCK_N, NEED_GATE_UP,
                                                  GROUP)
        take_turn(turns, j // 2, WHO)
        if NEED_X:
            if product == 0:
                out = _tile(results, a_bufs, b_bufs, full, empty, turns, outs, out, product, row, column, first, steps,
                            STAGES, BUFFERS, True, False, False, WHO)
        if NEED_GATE_UP or NEED_DOWN:
            if product > 0:
                out = _tile(results, a_t_bufs, b_bufs, full, empty, turns, outs, out, product, row, column, first,
                            steps, STAGES, BUFFERS, False, NEED_GATE_UP, NEED_DOWN, WHO)
    # fmt: on
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def glu_grads_gluon(
    dgate_desc,
    dup_desc,
    gate_desc,
    up_desc,
    dgate_t_desc,
    dup_t_desc,
    x_desc,
    gy_t_desc,
    h_desc,
    dx_desc,
    dgate_weight_desc,
    dup_weight_desc,
    ddown_weight_desc,
    M,
    H,
    D,
    D_OUT,
    H_DOWN,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_GATE_UP: gl.constexpr,
    NEED_DOWN: gl.constexpr,
):
    """Persistent, 4 warps (12 with the specialised ones). dgate, dup [M, H] box [BLOCK_M, BLOCK_K] and again, as
    operands that are transposed in shared memory, box [BLOCK_K, BLOCK_M]; so is gy [M, D_OUT]. gate, up weight [H, D],
    x [M, D] and h [M, H_DOWN] box [BLOCK_K, BLOCK_N]. Results box [BLOCK_M, COLUMNS], COLUMNS BLOCK_N or half of it.
    What no product that is asked for has to do with is None, but for dgate (both) and the gate weight."""
    DTYPE: gl.constexpr = dgate_desc.dtype
    BLOCK_M: gl.constexpr = dgate_desc.block_type.shape[0]
    a_bufs = gl.allocate_shared_memory(DTYPE, [STAGES] + dgate_desc.block_type.shape, dgate_desc.layout)
    a_t_bufs = a_bufs._reinterpret(DTYPE, [STAGES] + dgate_t_desc.block_type.shape, dgate_t_desc.layout)
    b_bufs = gl.allocate_shared_memory(DTYPE, [STAGES] + gate_desc.block_type.shape, gate_desc.layout)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, COLUMNS], DTYPE)
    outs0 = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_M, COLUMNS], out_layout)
    outs1 = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_M, COLUMNS], out_layout)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 1)
    turns = new_barriers(2, 1)
    fence_async_shared()  # the barriers are seen by TMA
    # fmt: off
    gl.warp_specialize([
        (_consume, (dx_desc, dgate_weight_desc, dup_weight_desc, ddown_weight_desc, a_bufs, a_t_bufs, b_bufs, full,
                    empty, turns, outs0, M, H, D, D_OUT, H_DOWN, STAGES, BUFFERS, GROUP, NEED_X, NEED_GATE_UP,
                    NEED_DOWN, 0)),
        (_consume, (dx_desc, dgate_weight_desc, dup_weight_desc, ddown_weight_desc, a_bufs, a_t_bufs, b_bufs, full,
                    empty, turns, outs1, M, H, D, D_OUT, H_DOWN, STAGES, BUFFERS, GROUP, NEED_X, NEED_GATE_UP,
                    NEED_DOWN, 1)),
        (_load_operands, (dgate_desc, dup_desc, gate_desc, up_desc, dgate_t_desc, dup_t_desc, x_desc, gy_t_desc,
                          h_desc, a_bufs, a_t_bufs, b_bufs, full, empty, M, H, D, D_OUT, H_DOWN, STAGES, GROUP,
                          NEED_X, NEED_GATE_UP, NEED_DOWN)),
    ], [4, 1], [216, 72])
    # fmt: on
