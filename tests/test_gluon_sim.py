"""The simulator of Gluon kernels: right numbers for a right kernel, and an error for every planted fault."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from itertools import count
from types import ModuleType

import pytest
import torch
from support import gluon_sim
from support.gluon import NEEDS_GLUON
from support.gluon_sim import Descriptor, launch

SAMPLE = "support.gluon_sample"
# M, N, K, programs, stages, slots. The first is ragged in all dimensions, the last has more programs than tiles.
SHAPES = [
    (40, 72, 80, 2, 3, 1),
    (64, 48, 96, 1, 2, 2),
    (40, 72, 80, 1, 4, 1),
    (17, 20, 12, 1, 2, 1),
    (33, 72, 76, 3, 5, 2),
    (16, 40, 64, 7, 3, 2),
]


def run(sample: ModuleType, shape: tuple[int, ...], **options) -> float:
    """Launch the sample; the largest error against float64."""
    M, N, K, programs, stages, slots = shape
    x, w, bias = torch.randn(M, K), torch.randn(N, K) / K**0.5, torch.randn(N)
    y = torch.full((M, N), torch.nan)
    descriptors = Descriptor(x, (16, 16)), Descriptor(w, (16, 16)), Descriptor(y, (16, 8))
    launch(sample.linear, programs, 4, *descriptors, bias, M, N, K, stages, slots, **options)
    exact = x.double() @ w.double().T + bias.double()
    return float((y - exact).abs().max().nan_to_num(nan=torch.inf))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_numbers(shape):
    sample = gluon_sim.load(SAMPLE)
    for seed in range(4):
        assert run(sample, shape, seed=seed) < 1e-5


def test_16_bit_operands_are_rounded_once():
    x, w, bias = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16(), torch.zeros(16).bfloat16()
    y = torch.zeros(16, 16, dtype=torch.bfloat16)
    descriptors = Descriptor(x, (16, 16)), Descriptor(w, (16, 16)), Descriptor(y, (16, 8))
    launch(gluon_sim.load(SAMPLE).linear, 1, 4, *descriptors, bias, 16, 16, 32, 2, 1)
    torch.testing.assert_close(y, (x.float() @ w.float().T).bfloat16(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_sample_is_gluon(dtype):
    """It compiles for Hopper: the simulator is not fed with a language of its own."""
    triton = pytest.importorskip("triton")
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        pytest.skip(NEEDS_GLUON)
    from support import gluon_sample
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    def descriptor(*block: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
        return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"

    blocks = descriptor(128, 64), descriptor(128, 64), descriptor(128, 64)
    types = [*blocks, f"*{dtype}", "i32", "i32", "i32", "constexpr", "constexpr"]
    kernel = gluon_sample.linear
    signature = dict(zip(kernel.arg_names, types, strict=True))
    attributes = {(3,): [["tt.divisibility", 16]]}
    source = GluonASTSource(kernel, signature, {(7,): 4, (8,): 1}, attributes)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier.try_wait", "fence.proxy.async"):
        assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared < 232_448


# Each is (a text of the sample, what stands there instead).
NEXT = "(use + 1) % STAGES"
RELEASE = "mbarrier.arrive(freed.index((use + STAGES - 1) % STAGES), count=1"
LAST_WAIT = "        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))\n"
FAULTS = {
    "no wait for the turn": ("        mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))\n", ""),
    "wrong parity of the turn": ("(turn & 1) ^ (1 - WHO)", "(turn & 1) ^ WHO"),
    "turn not handed over": ("        mbarrier.arrive(turns.index(1 - WHO), count=1)\n", ""),
    "stage released while it is read": (f"{RELEASE}, pred=k > 0)", "mbarrier.arrive(freed.index(stage), count=1)"),
    "last stage released before the wait": (f"{LAST_WAIT}        {RELEASE})\n", f"        {RELEASE})\n{LAST_WAIT}"),
    "two products in flight": ("num_outstanding=1", "num_outstanding=2"),
    "wrong parity in the producer": ("((use // STAGES) & 1) ^ 1", "(use // STAGES) & 1"),
    "wrong parity in a consumer": ("wait(filled.index(stage), (", "wait(filled.index(stage), 1 ^ ("),
    "phase for parity": ("wait(filled.index(stage), (use // STAGES) & 1)", "wait(filled.index(stage), use // STAGES)"),
    "no wait for a filled stage": ("        mbarrier.wait(filled.index(stage), (use // STAGES) & 1)\n", ""),
    "no wait for a free stage": ("            mbarrier.wait(freed.index(stage), ((use // STAGES) & 1) ^ 1)\n", ""),
    "wrong stage read": ("w = ws.index(stage)", f"w = ws.index({NEXT})"),
    "wrong stage written": ("filled.index(stage), ws.index(stage))", f"filled.index(stage), ws.index({NEXT}))"),
    "wrong barrier signalled": ("filled.index(stage), ws.index(stage))", f"filled.index({NEXT}), ws.index(stage))"),
    "the other's stages not skipped": ("        use += steps  # the other consumer's\n", ""),
    "no store_wait": ("    tma.store_wait(SLOTS - 1)\n", ""),
    "store_wait for one too few": ("tma.store_wait(SLOTS - 1)", "tma.store_wait(SLOTS)"),
    "stores in flight at the end": ("    tma.store_wait(0)\n", ""),
    "no wait for the last product": (LAST_WAIT, ""),
    "no fence before a TMA store": ("    fence_async_shared()\n    tma_store", "    tma_store"),
    "too few bytes expected": ("nbytes + w_desc.block_type.nbytes", "nbytes"),
    "too many bytes expected": ("nbytes + w_desc.block_type.nbytes", "nbytes + 2 * w_desc.block_type.nbytes"),
    "stage never released": (f"        {RELEASE})\n", ""),
    "stage released twice": (f"{RELEASE})", f"{RELEASE})\n        {RELEASE})"),
    "wrong column stored": ("right, row, column + HALF", "right, row, column"),
}  # fmt: skip
SAYS = {
    "turn not handed over": "deadlock.* waits for turns",
    "phase for parity": "takes a parity",
    "no store_wait": "store of out.* TMA store of out.* in flight",
    "stores in flight at the end": "ended with TMA stores in flight",
    "no fence before a TMA store": "without fence_async_shared",
    "too many bytes expected": "deadlock.* waits for filled.* 1024 bytes missing",
    "stage never released": "deadlock.* waits for freed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault):
    """Under every shape with enough tiles and every seed, not now and then."""
    text, instead = FAULTS[fault]
    sample = gluon_sim.load(SAMPLE, {text: instead})
    for shape in SHAPES[:3]:
        for seed in range(3):
            said = ""
            try:
                error = run(sample, shape, seed=seed, limit=5.0)
            except (AssertionError, TimeoutError) as caught:
                error, said = torch.inf, str(caught)
            assert error > 1e-3, f"{shape}, seed {seed}: not seen"
            assert re.search(SAYS.get(fault, ""), said), said


def test_a_seed_brings_a_failure_back():
    sample = gluon_sim.load(SAMPLE, dict([FAULTS["no wait for the turn"]]))

    def message(seed: int) -> str:
        with pytest.raises((AssertionError, TimeoutError)) as caught:
            run(sample, SHAPES[0], seed=seed)
        return str(caught.value)

    assert [message(seed) for seed in range(4)] == [message(seed) for seed in range(4)]


# Kernels of a few lines.

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import *
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
"""
_numbers = count()


@pytest.fixture
def package(tmp_path, monkeypatch) -> Callable[..., str]:
    """Writes modules as a new package; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**sources: str) -> str:
        folder = tmp_path / f"gluon_kernels_{next(_numbers)}"
        folder.mkdir()
        for name, source in ({"__init__": ""} | sources).items():
            (folder / f"{name}.py").write_text(source)
        return folder.name

    return write


@pytest.fixture
def kernel(package) -> Callable[[str], ModuleType]:
    return lambda source: gluon_sim.load(f"{package(one=HEAD + source)}.one")


@pytest.mark.parametrize("own", ["", HEAD], ids=["plain package", "Gluon package"])
def test_siblings_come_along_and_nothing_stays(package, own):
    name = package(
        __init__=own,
        common=HEAD + "@gluon.jit\ndef twice(x):\n    return gl.where(x > 0, 2 * x, x)\n",
        plain="import math\nHALF = 0.5\n",
        one=HEAD + "from . import common, plain\nfrom .common import twice\nimport triton.experimental.gluon as g\n"
        "@g.jit(do_not_specialize=['n'])\ndef copy(x, y, n: gl.constexpr):\n"
        "    at = gl.arange(0, n, gl.BlockedLayout([1], [32], [4], [0]))\n"
        "    gl.store(y + at, twice(gl.load(x + at)) * plain.HALF + common.twice(1))\n",
    )
    sys.modules.pop(f"{name}.plain", None)
    before = {key: module for key, module in sys.modules.items() if not key.startswith(name)}
    module = gluon_sim.load(f"{name}.one")
    changed = gluon_sim.load(f"{name}.one", {"2 * x": "3 * x"})  # which stands in the sibling
    assert {key: value for key, value in sys.modules.items() if not key.startswith(name)} == before
    assert f"{name}.one" not in sys.modules and f"{name}.common" not in sys.modules
    x, y = torch.arange(8.0), torch.zeros(8)
    launch(module.copy, 1, 4, x, y, 8)
    assert torch.equal(y, x + 2)
    launch(changed.copy, 1, 4, x, y, n=8)
    assert torch.equal(y, 1.5 * x + 3)


def test_names_and_texts_that_are_not_there(kernel):
    with pytest.raises(AssertionError, match="found 0 times"):
        gluon_sim.load(SAMPLE, {"no such text": ""})
    with pytest.raises(ImportError, match="uses Gluon"):
        gluon_sim.load("support.cases")
    with pytest.raises(AttributeError, match="no triton.experimental.gluon.language.histogram"):
        launch(kernel("def f(x):\n    gl.histogram(x, 4)\n").f, 1, 4, torch.zeros(4))


def test_a_released_slot_needs_a_fence(kernel):
    """A load through registers, then TMA into the same slot: two proxies."""
    source = """
def take(slots, full, empty, y, n):
    for i in range(n):
        mbarrier.wait(full.index(0), i & 1)
        x = slots.index(0).load(gl.AutoLayout())
        fence_async_shared()
        mbarrier.arrive(empty.index(0))
        rows = gl.expand_dims(gl.arange(0, 4), 1)
        gl.store(y + i * 16 + rows * 4 + gl.arange(0, 4)[None, :], x)

def give(x_desc, slots, full, empty, n):
    for i in range(n):
        mbarrier.wait(empty.index(0), (i & 1) ^ 1)
        mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
        tma.async_load(x_desc, [4 * i, 0], full.index(0), slots.index(0))

def copy(x_desc, y, n):
    slots = gl.allocate_shared_memory(x_desc.dtype, [1, 4, 4], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    gl.warp_specialize([(take, (slots, full, empty, y, n)), (give, (x_desc, slots, full, empty, n))], [1], [24])
"""
    x, y = torch.randn(12, 4), torch.zeros(12, 4)
    launch(kernel(source).copy, 1, 4, Descriptor(x, (4, 4)), y, 3)
    assert torch.equal(x, y)
    with pytest.raises(AssertionError, match=r"TMA load of slots\[0\] by give/1 after a load .* without fence"):
        launch(kernel(source.replace("        fence_async_shared()\n", "")).copy, 1, 4, Descriptor(x, (4, 4)), y, 3)


def test_blocks_of_three_dimensions(kernel):
    source = """
def move(x_desc, y_desc, i, j):
    buf = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, i, j], bar, buf)
    mbarrier.wait(bar, 0)
    both = buf.reshape([8, 8]).load(gl.AutoLayout())
    buf.slice(1, 1).store(gl.reshape(both, [2, 4, 8])[1:] + 1.0)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [0, i, j], buf)
    tma.store_wait(pendings=0)
    mbarrier.invalidate(bar)
"""
    x, y = torch.randn(2, 6, 10), torch.zeros(2, 4 * 4, 16)
    launch(kernel(source).move, 1, 4, Descriptor(x, (2, 4, 8)), Descriptor(y, (2, 4, 8)), 4, 8)
    want = torch.zeros_like(y)
    want[:, 4:6, 8:10] = x[:, 4:, 8:]
    want[1, 4:8, 8:] += 1
    assert torch.equal(y, want)
    small = torch.zeros(2, 5, 9)
    launch(kernel(source).move, 1, 4, Descriptor(x, (2, 4, 8)), Descriptor(small, (2, 4, 8)), 4, 8)
    assert torch.equal(small[:, 4:, 8:], want[:, 4:5, 8:9]) and small[:, :4].eq(0).all()


def test_products_finish_in_order_of_issue(kernel):
    """Two accumulators: waiting for all but one completes the first, not the second."""
    source = """
def f(a, y, first: gl.constexpr, number: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.float32, [4, 4], None)
    at = gl.expand_dims(gl.arange(0, 4), 1) * 4 + gl.expand_dims(gl.arange(0, 4), 0)
    buf.store(gl.load(a + at))
    fence_async_shared()
    zero = gl.zeros([4, 4], gl.float32)
    one = warpgroup_mma(buf, buf, zero, use_acc=False, is_async=True)
    two = warpgroup_mma(buf.load(), buf.permute((1, 0)), zero, is_async=True)
    if first:
        one, two = warpgroup_mma_wait(num_outstanding=number, deps=(one, two))
        gl.store(y + at, one)
        two = warpgroup_mma_wait(num_outstanding=0, deps=(two,))
    else:
        one, two = warpgroup_mma_wait(num_outstanding=number, deps=(one, two))
        gl.store(y + at, two)
        warpgroup_mma_wait(num_outstanding=0, deps=(one,))
"""
    module = kernel(source)
    a, y = torch.randn(4, 4), torch.zeros(4, 4)
    launch(module.f, 1, 4, a, y, True, 1)
    torch.testing.assert_close(y, a @ a)
    launch(module.f, 1, 4, a, y, False, 0)
    torch.testing.assert_close(y, a @ a.T)
    with pytest.raises(AssertionError, match="in flight"):
        launch(module.f, 1, 4, a, y, False, 1)


def test_language(kernel):
    source = """
GAIN: gl.constexpr = gl.constexpr(2.0)

def f(x, y, counter, n, N: gl.constexpr):
    gl.static_assert(N % 2 == 0)
    at = gl.program_id(0) * N + gl.arange(0, N, gl.SliceLayout(0, gl.BlockedLayout([1], [32], [4], [0])))
    v = gl.load(x + at, mask=at < n, other=0.0).to(gl.float32)
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [v], dtype=gl.float32, is_pure=True, pack=1)
    e = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [-v], dtype=gl.float32, is_pure=True, pack=1)
    s = gl.fma(t, GAIN, e) + gl.erf(gl.minimum(v, 1.0)) - gl.sqrt(gl.abs(v)) + gl.rsqrt(gl.exp(v)) * gl.log(1 + v * v)
    left, right = gl.split(gl.reshape(gl.where(v > 0, s, gl.exp2(v)), [N // 2, 2]))
    s = gl.reshape(gl.join(left, right), [N])
    gl.store(y + at, gl.convert_layout(s, v.type.layout).to(y.dtype.element_ty), mask=at < n)
    gl.thread_barrier()
    gl.atomic_add(counter, gl.sum(gl.full([N], 1, gl.int32), 0), sem="relaxed")
    gl.atomic_add(counter + 1 + at % 2, gl.maximum(gl.num_warps(), 1), mask=at < n)
"""
    x, y, counter = torch.randn(13).double(), torch.zeros(13, dtype=torch.float16), torch.zeros(3, dtype=torch.int32)
    launch(kernel(source).f, (gluon_sim.LANGUAGE["cdiv"](13, 8),), 4, x, y, counter, 13, 8)
    s = 2 * x.tanh() + torch.exp2(-x) + torch.erf(x.clamp(max=1)) - x.abs().sqrt() + torch.log1p(x * x) / x.exp().sqrt()
    torch.testing.assert_close(y, torch.where(x > 0, s, x.exp2()).half(), rtol=2e-3, atol=1e-4)
    assert counter.tolist() == [16, 28, 24]
    with pytest.raises(AssertionError, match="outside of its tensor"):
        launch(kernel(source).f, 2, 4, x, y, counter, 14, 8)


WAITING = """
def wait(bar, x):
    mbarrier.wait(bar.index(1), 0)

def {name}(bar, x):
    {body}

def f(x):
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.init(bar.index(1), count=1)
    gl.warp_specialize([(wait, (bar, x)), (wait, (bar, x)), ({name}, (bar, x))], [4, 1], [24, 24])
"""


@pytest.mark.parametrize(
    "name, body, error, match",
    [
        ("ends", "pass", TimeoutError, r"deadlock: .*wait/0 waits for bar\[1\]"),
        ("spins", "while gl.load(x) == 0: pass", TimeoutError, r"wait/. has waited 0.5 s for bar\[1\]"),
        ("hangs", "while True: pass_time()", TimeoutError, "hangs/2 has done nothing for 0.5 s"),
        ("fails", "raise KeyError('mine')", KeyError, "mine"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_waits_end(kernel, name, body, error, match):
    """Whatever one partition does, a launch ends soon, and says who waits for what."""
    module = kernel(WAITING.format(name=name, body=body))
    stop = []

    def pass_time() -> None:
        time.sleep(0.01)
        if stop:
            raise SystemExit

    module.pass_time = pass_time
    start = time.monotonic()
    try:
        with pytest.raises(error, match=match):
            launch(module.f, 1, 4, torch.zeros(1), limit=0.5)
    finally:
        stop.append(True)
    assert time.monotonic() - start < 5
