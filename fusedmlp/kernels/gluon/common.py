"""Pieces of the warp-specialised kernels: operand rings, turns of two warpgroups, halves of an accumulator.

A ring is ``stages`` buffers in shared memory with two barriers each: the producer fills a buffer and ``full``
completes with its bytes; a consumer gives it back through ``empty``. Step ``i`` of a program uses buffer
``i % stages``. A barrier tells the parity of its last completed phase and no more, so nobody may wait for a buffer's
next use but one: two consumers of one ring pass a turn to each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.8 renamed these two.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def tile_of(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The (row, column) of a tile, in bands of GROUP tile rows: neighbouring programs share weight tiles in L2."""
    per_band = GROUP * tiles_n
    first = (tile // per_band) * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    rest = tile % per_band
    return first + rest % rows, rest // rows


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers; a phase completes after ARRIVALS arrivals (and the bytes expected meanwhile)."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def wait_full(full, i, STAGES: gl.constexpr):
    mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)


@gluon.jit
def wait_empty(empty, i, STAGES: gl.constexpr):
    """The first use of a buffer needs no wait: the parity before any phase counts as completed."""
    mbarrier.wait(empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)


@gluon.jit
def release(empty, i, STAGES: gl.constexpr, pred=True):
    mbarrier.arrive(empty.index(i % STAGES), count=1, pred=pred)


@gluon.jit
def take_turn(turns, own_tile, WHO: gl.constexpr):
    """Until the other warpgroup has gone on; warpgroup 0 begins."""
    mbarrier.wait(turns.index(WHO), (own_tile & 1) ^ (1 - WHO))


@gluon.jit
def pass_turn(turns, WHO: gl.constexpr):
    mbarrier.arrive(turns.index(1 - WHO), count=1)


@gluon.jit
def multiply(
    acc,
    a_bufs,
    b_bufs,
    full,
    empty,
    first,
    steps,
    STAGES: gl.constexpr,
    ROWS_OF_B: gl.constexpr,
    COLUMNS_OF_A: gl.constexpr = False,
):
    """``acc = sum over the ring's next steps of a b``, the last product still in flight; call :func:`finish` on it.

    ROWS_OF_B: b lies as the columns' weights, [BLOCK_N, BLOCK_K]; otherwise as [BLOCK_K, BLOCK_N].
    COLUMNS_OF_A: a lies as [BLOCK_K, BLOCK_M]; otherwise as [BLOCK_M, BLOCK_K]. wgmma takes 16-bit types either way.
    A buffer goes back one step late, when its product is known to have read it.
    """
    for k in range(steps):
        i = first + k
        wait_full(full, i, STAGES)
        a = a_bufs.index(i % STAGES)
        b = b_bufs.index(i % STAGES)
        if COLUMNS_OF_A:
            a = a.permute((1, 0))
        if ROWS_OF_B:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        release(empty, i + STAGES - 1, STAGES, pred=k > 0)
    return acc


@gluon.jit
def finish(acc, empty, end, STAGES: gl.constexpr):
    """Wait for the last product, whose step was ``end - 1``, and give its buffer back."""
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    release(empty, end + STAGES - 1, STAGES)
    return acc


@gluon.jit
def column_halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """``[ROWS, 2 COLUMNS]`` -> left, right. In an accumulator's layout this renames registers."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS]), (0, 2, 1)))


@gluon.jit
def column_parts(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """x in one, two or four parts of COLUMNS, from left to right; the last one again where there are fewer."""
    PARTS: gl.constexpr = x.shape[1] // COLUMNS
    if PARTS == 1:
        p0, p1, p2, p3 = x, x, x, x
    elif PARTS == 2:
        p0, p1 = column_halves(x, ROWS, COLUMNS)
        p2, p3 = p1, p1
    else:
        gl.static_assert(PARTS == 4)
        left, right = column_halves(x, ROWS, 2 * COLUMNS)
        p0, p1 = column_halves(left, ROWS, COLUMNS)
        p2, p3 = column_halves(right, ROWS, COLUMNS)
    return p0, p1, p2, p3


@gluon.jit
def row_halves(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """``[2 ROWS, COLUMNS]`` -> upper, lower; register renaming for four warps and ROWS a multiple of 64."""
    return gl.split(gl.permute(gl.reshape(x, [2, ROWS, COLUMNS]), (1, 2, 0)))


@gluon.jit
def put(value, desc, bufs, i, row, column, BUFFERS: gl.constexpr):
    """Store a tile by TMA, through the ``i``-th use of a ring of BUFFERS; at most BUFFERS - 1 older stores go on."""
    tma.store_wait(BUFFERS - 1)
    buf = bufs.index(i % BUFFERS)
    buf.store(value.to(desc.dtype))
    fence_async_shared()
    async_store(desc, [row, column], buf)
    return i + 1


@gluon.jit
def load_operands(gy_desc, w_desc, a_bufs, b_bufs, full, empty, M, N, K, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """One warp: the operands of ``gy [M, K] w [K, N]``, step by step of every tile of the program."""
    BLOCK_M: gl.constexpr = gy_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = gy_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1]
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        for k in range(steps):
            wait_empty(empty, i, STAGES)
            bar = full.index(i % STAGES)
            mbarrier.expect(bar, gy_desc.block_type.nbytes + w_desc.block_type.nbytes)
            async_load(gy_desc, [pid_m * BLOCK_M, k * BLOCK_K], bar, a_bufs.index(i % STAGES))
            async_load(w_desc, [k * BLOCK_K, pid_n * BLOCK_N], bar, b_bufs.index(i % STAGES))
            i += 1
