"""``y = x w^T + bias`` in the ping-pong form: the smallest kernel with all that the simulator models.

One warp loads tiles of x and w into a ring of stages. Two consumers take tiles in turn, so that the epilogue of one
runs beside the main loop of the other. A consumer has the ring to itself while it has the turn: a wait sees only the
parity of a barrier, so that it must not begin while older uses of the stage are still to come.
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

# Triton 3.8 gave them shorter names.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def produce(x_desc, w_desc, xs, ws, filled, freed, tiles_m, tiles_n, steps):
    STAGES: gl.constexpr = xs.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    use = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row = tile // tiles_n * BLOCK_M
        column = tile % tiles_n * BLOCK_N
        for k in range(steps):
            stage = use % STAGES
            mbarrier.wait(freed.index(stage), ((use // STAGES) & 1) ^ 1)
            mbarrier.expect(filled.index(stage), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(x_desc, [row, k * BLOCK_K], filled.index(stage), xs.index(stage))
            tma_load(w_desc, [column, k * BLOCK_K], filled.index(stage), ws.index(stage))
            use += 1


@gluon.jit
def multiply(acc, xs, ws, filled, freed, use, steps):
    """A tile's main loop, with one product in flight: a stage is handed back when the next one is being read."""
    STAGES: gl.constexpr = xs.shape[0]
    for k in range(steps):
        stage = use % STAGES
        mbarrier.wait(filled.index(stage), (use // STAGES) & 1)
        w = ws.index(stage).permute((1, 0))
        acc = warpgroup_mma(xs.index(stage), w, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(freed.index((use + STAGES - 1) % STAGES), count=1, pred=k > 0)
        use += 1
    return acc, use


@gluon.jit
def put(y_desc, out, slot, value, row, column):
    """Send a block to memory by TMA; as many may be on their way as there are slots."""
    SLOTS: gl.constexpr = out.shape[0]
    tma.store_wait(SLOTS - 1)
    out.index(slot).store(value.to(y_desc.dtype))
    fence_async_shared()
    tma_store(y_desc, [row, column], out.index(slot))
    return (slot + 1) % SLOTS


@gluon.jit
def consume(y_desc, bias, xs, ws, out, filled, freed, turns, tiles_m, tiles_n, steps, N, WHO: gl.constexpr):
    STAGES: gl.constexpr = xs.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_N: gl.constexpr = ws.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    programs = gl.num_programs(0)
    use = WHO * steps
    slot = 0
    turn = 0
    for tile in range(gl.program_id(0) + WHO * programs, tiles_m * tiles_n, 2 * programs):
        row = tile // tiles_n * BLOCK_M
        column = tile % tiles_n * BLOCK_N
        # The first turn is consumer 0's without anybody handing it over.
        mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        acc, use = multiply(acc, xs, ws, filled, freed, use, steps)
        mbarrier.arrive(turns.index(1 - WHO), count=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(freed.index((use + STAGES - 1) % STAGES), count=1)
        use += steps  # the other consumer's
        turn += 1
        columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        acc += gl.expand_dims(gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32), 0)
        left, right = gl.split(gl.permute(gl.reshape(acc, [BLOCK_M, 2, HALF]), (0, 2, 1)))
        slot = put(y_desc, out, slot, left, row, column)
        slot = put(y_desc, out, slot, right, row, column + HALF)
    tma.store_wait(0)


@gluon.jit
def linear(x_desc, w_desc, y_desc, bias, M, N, K, STAGES: gl.constexpr, SLOTS: gl.constexpr):
    """Blocks: x [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K], y [BLOCK_M, BLOCK_N / 2]."""
    tiles_m = gl.cdiv(M, x_desc.block_type.shape[0])
    tiles_n = gl.cdiv(N, w_desc.block_type.shape[0])
    steps = gl.cdiv(K, w_desc.block_type.shape[1])
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out0 = gl.allocate_shared_memory(y_desc.dtype, [SLOTS] + y_desc.block_type.shape, y_desc.layout)
    out1 = gl.allocate_shared_memory(y_desc.dtype, [SLOTS] + y_desc.block_type.shape, y_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (y_desc, bias, xs, ws, out0, filled, freed, turns, tiles_m, tiles_n, steps, N, 0)),
            (consume, (y_desc, bias, xs, ws, out1, filled, freed, turns, tiles_m, tiles_n, steps, N, 1)),
            (produce, (x_desc, w_desc, xs, ws, filled, freed, tiles_m, tiles_n, steps)),
        ],
        [4, 1],
        [232, 40],
    )
