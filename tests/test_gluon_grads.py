"""The grouped products after the gated backward, in the simulator of their barriers, rings and TMA accesses, against
float64; and the schedule that every program makes for itself, alone."""

from __future__ import annotations

import heapq
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from support import gluon_sim
from support.aot import DEVICES, pretended
from support.gluon import needs_gluon
from support.gluon_sim import Descriptor, launch
from torch import Tensor

from fusedmlp import explain_plan, functional, settings

MODULE = "fusedmlp.kernels.gluon.glu_grads"
# Three sizes that differ, so that an operand seen the wrong way round does not fit.
BLOCK_M, BLOCK_N, BLOCK_K = 32, 16, 8
# M, H, D, D_out, programs: ragged in all dimensions; one tile each; dX the shorter sum; more programs than tiles; one
# program; programs with a dX tile and without, in a number that nothing is a multiple of.
SHAPES = [
    (40, 40, 24, 40, 3),
    (8, 8, 8, 8, 2),
    (130, 20, 24, 12, 5),
    (36, 24, 20, 36, 40),
    (20, 44, 12, 70, 1),
    (70, 72, 24, 20, 7),
]
RINGS = [(2, 1, 16), (3, 2, 8), (5, 1, 8)]  # stages, buffers, columns of a store
NEEDS = [needs for needs in product((True, False), repeat=3) if any(needs)]
ALL = (True, True, True)


def check_grads(shape, ring, needs=ALL, strided=False, seed=0):
    kernel = gluon_sim.load(MODULE).glu_grads_gluon
    M, H, D, D_out, programs = shape
    stages, buffers, columns = ring
    needs_x, needs_gate_up, needs_down = needs
    gy, h, x, dgate_up = torch.randn(M, D_out), torch.randn(M, H), torch.randn(M, D), torch.randn(M, 2 * H)
    gate, up = (torch.randn(H, D + pad)[:, :D] for pad in ((8, 16) if strided else (0, 0)))
    dx, dgate_up_weight, ddown = (torch.full(size, torch.nan) for size in ((M, D), (2 * H, D), (D_out, H)))
    dgate, dup = dgate_up[:, :H], dgate_up[:, H:]

    def seen(tensor: Tensor, wanted: bool, *box: int) -> Descriptor | None:
        return Descriptor(tensor, box) if wanted else None

    launch(
        kernel,
        programs,
        4,
        seen(dgate, True, BLOCK_M, BLOCK_K),
        seen(dup, needs_x, BLOCK_M, BLOCK_K),
        seen(gate, True, BLOCK_K, BLOCK_N),
        seen(up, needs_x, BLOCK_K, BLOCK_N),
        seen(dgate, True, BLOCK_K, BLOCK_M),
        seen(dup, needs_gate_up, BLOCK_K, BLOCK_M),
        seen(x, needs_gate_up, BLOCK_K, BLOCK_N),
        seen(gy, needs_down, BLOCK_K, BLOCK_M),
        seen(h, needs_down, BLOCK_K, BLOCK_N),
        seen(dx, needs_x, BLOCK_M, columns),
        seen(dgate_up_weight[:H], needs_gate_up, BLOCK_M, columns),
        seen(dgate_up_weight[H:], needs_gate_up, BLOCK_M, columns),
        seen(ddown, needs_down, BLOCK_M, columns),
        *(M, H, D, D_out, H, stages, buffers, 2, columns, *needs),
        seed=seed,
    )
    exact = (
        dgate.double() @ gate.double() + dup.double() @ up.double(),
        dgate_up.double().T @ x.double(),
        gy.double().T @ h.double(),
    )
    for found, right, wanted in zip((dx, dgate_up_weight, ddown), exact, needs, strict=True):
        if wanted:
            assert float((found.double() - right).norm() / right.norm()) < 2e-6
        else:
            assert found.isnan().all()


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_three(shape, ring):
    for seed in range(2):
        check_grads(shape, ring, seed=seed)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_each_combination(needs):
    for shape in SHAPES:
        check_grads(shape, (3, 1, 8), needs)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_weights_with_row_strides_of_their_own(shape):
    check_grads(shape, (3, 1, 16), strided=True)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_layers(shape, ring):
    """The halves of the hidden layer stand for gate and up; h is as wide as both."""
    kernel = gluon_sim.load(MODULE).glu_grads_gluon
    M, H, D, D_out, programs = shape
    stages, buffers, columns = ring
    gy, h, x, dpre = torch.randn(M, D_out), torch.randn(M, 2 * H), torch.randn(M, D), torch.randn(M, 2 * H)
    fc1 = torch.randn(2 * H, D + 8)[:, :D]
    dx, dw1, dw2 = (torch.full(size, torch.nan) for size in ((M, D), (2 * H, D), (D_out, 2 * H)))
    rows, columns_of_a, of_b, out = (BLOCK_M, BLOCK_K), (BLOCK_K, BLOCK_M), (BLOCK_K, BLOCK_N), (BLOCK_M, columns)
    seen = [(dpre[:, :H], rows), (dpre[:, H:], rows), (fc1[:H], of_b), (fc1[H:], of_b)]
    seen += [(dpre[:, :H], columns_of_a), (dpre[:, H:], columns_of_a), (x, of_b), (gy, columns_of_a), (h, of_b)]
    seen += [(dx, out), (dw1[:H], out), (dw1[H:], out), (dw2, out)]
    sizes = (M, H, D, D_out, 2 * H, stages, buffers, 2, columns, *ALL)
    launch(kernel, programs, 4, *(Descriptor(tensor, box) for tensor, box in seen), *sizes, seed=0)
    exact = (dpre.double() @ fc1.double(), dpre.double().T @ x.double(), gy.double().T @ h.double())
    for found, right in zip((dx, dw1, dw2), exact, strict=True):
        assert float((found.double() - right).norm() / right.norm()) < 2e-6


# M, H, D, D_out, programs and blocks of the schedule: what an H200 is to run, and small ones of every kind.
REAL = [(M, H, D, D, 132, 128, 128, 64) for M in (1, 512, 1024, 2048, 8192) for D, H in ((768, 3072), (2304, 9216))]
SMALL = [(*shape, BLOCK_M, BLOCK_N, BLOCK_K) for shape in SHAPES]


@pytest.mark.parametrize("needs", [ALL, (True, False, False), (False, True, True), (True, False, True)], ids=str)
@pytest.mark.parametrize("halves", [False, True], ids=["gated", "two layers"])
@pytest.mark.parametrize("case", REAL + SMALL, ids=str)
def test_the_schedule_is_the_greedy_one(case, halves, needs):
    """Each tile once, steps counted on without gaps, and loads as by giving each tile, longest first, to whoever has
    least to do."""
    M, H, D, D_out, programs, m, n, k = case
    h_down = 2 * H if halves else H
    module = gluon_sim.load(MODULE)
    seen, loads, sums = [], [], []
    for program in range(programs):
        place = {"program_id": lambda axis, p=program: p, "num_programs": lambda axis: programs}
        module.gl = SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min, **place)
        own, shares = module._shares(M, H, D, D_out, h_down, m, n, k, *needs)
        steps_before = 0
        for j in range(own):
            kind, row, column, first, steps = module._nth(j, shares, M, H, D, D_out, h_down, m, n, needs[1], 8)
            assert first == steps_before
            assert steps == (2 * -(-H // k) if kind == 0 else -(-M // k))
            steps_before += steps
            seen.append((kind, row, column))
            sums.append(steps)
        loads.append(steps_before)
    sizes = ((M, D), (H, D), (H, D), (D_out, h_down))
    wanted = {
        (kind, row, column)
        for kind, (rows, columns) in enumerate(sizes)
        if needs[(0, 1, 1, 2)[kind]]
        for row in range(0, rows, m)
        for column in range(0, columns, n)
    }
    assert len(seen) == len(wanted) and set(seen) == wanted
    greedy = [0] * programs
    for steps in sorted(sums, reverse=True):
        heapq.heapreplace(greedy, greedy[0] + steps)
    assert sorted(loads) == sorted(greedy)


FAULTS = [
    ("        take_turn(turns, j // 2, WHO)\n", ""),
    ("    pass_turn(turns, WHO)\n", ""),
    ("    acc = finish(acc, empty, first + steps, STAGES)\n", ""),
    ("        wait_empty(empty, i + k, STAGES)\n", ""),
    ("        stage = (i + k) % STAGES\n", "        stage = k % STAGES\n"),
    ("first = own_longs * long_steps + s * short_steps", "first = j * short_steps"),
    ("+ s * short_steps\n", "+ own_catching_up * short_steps\n"),
    ("    tma.store_wait(BUFFERS - 1)\n    buf = outs", "    buf = outs"),
    ("    # fmt: on\n    tma.store_wait(0)\n", "    # fmt: on\n"),
    ("    fence_async_shared()\n    if NEED_X", "    if NEED_X"),
    ("a_desc.block_type.nbytes + b_desc.block_type.nbytes", "a_desc.block_type.nbytes"),
    ("i + half, half, row", "i, half, row"),
    ("(dup_desc, up_desc, a_bufs", "(dup_desc, gate_desc, a_bufs"),
    ("product = 1 + tile // gate_tiles", "product = 1 + tile % 2"),
    ("tile = catching_up + rank +", "tile = rank +"),
    ("num_outstanding=1", "num_outstanding=2"),
    ("pred=k > 0)\n    return acc", "pred=k > 1)\n    return acc"),
]


@pytest.mark.parametrize("right, wrong", FAULTS, ids=lambda text: text.strip()[:40])
def test_faults_are_noticed(right, wrong, monkeypatch):
    """The tests above can fail: each of these changes makes one of them do so."""
    plain = gluon_sim.load
    plain(MODULE, {right: wrong})  # the text is there
    monkeypatch.setattr(gluon_sim, "load", lambda name: plain(name, {right: wrong}))
    monkeypatch.setattr(gluon_sim, "LIMIT", 5.0)

    def all_shapes():
        for shape, ring in product(SHAPES, RINGS[:2]):
            check_grads(shape, ring)

    with pytest.raises((AssertionError, TimeoutError)):
        all_shapes()


def launched(dtype=torch.bfloat16, H=3072, D=768, frozen=(), apart=False, device="nvidia-h200", tokens=8192, **forced):
    """What a step of a gated MLP launches of ours, in order, and what is said of it."""

    def make(rows: int, columns: int, name: str = "", pad: int = 0) -> Tensor:
        base = torch.empty(rows, columns + pad, dtype=dtype, device="meta")
        return base[:, :columns].requires_grad_(name not in frozen)

    operands = make(tokens, D, "x"), make(H, D, "gate"), make(H, D, "up", 64 if apart else 0), make(D, H, "down")
    with settings.override(**forced), pretended(DEVICES[device]) as recorded:
        note = explain_plan(lambda: functional.glu_mlp(*operands, activation="gelu_tanh")).notes[0]
        y = functional.glu_mlp(*operands, activation="gelu_tanh")
        del recorded[:]
        if y.requires_grad:
            y.backward(torch.empty_like(y))
        grads = [None if t.grad is None else tuple(t.grad.shape) for t in operands]
    assert grads == [None if n in frozen else tuple(t.shape) for n, t in zip(NAMES, operands, strict=True)]
    return [entry.name for entry in recorded], note


NAMES = ("x", "gate", "up", "down")


@needs_gluon
def test_a_step_that_is_forced_to_group_them_makes_one_launch_of_the_three():
    for extra in ({}, {"apart": True}, {"dtype": torch.float16}, {"H": 3080}):
        names, note = launched(**extra, family="gluon")
        assert names == ["hidden_backward_gluon", "glu_grads_gluon"]
        assert len(note.backward) == 2 and "dX, dWgate, dWup and dWdown [gluon 128x128x64" in note.backward[1]
        assert "grads: gluon" in note.settings and "dgrad" not in note.settings


@needs_gluon
def test_a_step_groups_them_by_itself_where_that_pays():
    """Launches of a backward: the hidden layer, and all products."""
    for tokens, D, H, tile in (
        (16, 576, 1536, 64),
        (33, 768, 3072, 64),
        (512, 768, 3072, 64),
        (1024, 768, 3072, 128),
        (256, 2304, 9216, 128),
        (4096, 2304, 9216, 128),
        (8192, 384, 1536, 128),
    ):
        names, note = launched(tokens=tokens, D=D, H=H)
        assert names[0].startswith(("glu_", "hidden_")) and names[1:] == ["glu_grads_gluon"]
        assert note.backward[-1].startswith(f"dX, dWgate, dWup and dWdown [gluon {tile}x128x64")
        assert "grads: gluon" in note.settings and "dgrad" not in note.settings


@needs_gluon
def test_the_weights_gradients_share_a_launch_where_dx_is_not_wanted_or_would_keep_them_waiting():
    for tokens, D, H, frozen in (
        (512, 768, 3072, ("x",)),
        (16, 768, 3072, ()),
        (64, 1024, 4096, ()),
        (16, 2304, 9216, ()),
        (128, 2304, 9216, ()),
        (8192, 1024, 4096, ()),
        (8192, 4096, 14336, ()),
    ):
        names, note = launched(tokens=tokens, D=D, H=H, frozen=frozen)
        assert names[0].startswith(("glu_", "hidden_")) and names[1] == "glu_grads_gluon"
        if not frozen:  # of a note all gradients are wanted
            ran = [text for text in note.backward if text.startswith(("dWgate", "dX", "cuBLAS"))]
            assert ran[0].startswith("dWgate, dWup and dWdown [gluon 128x128x64") and "dX" in ran[1]
            assert "wgrads: gluon" in note.settings and "dgrad: " in note.settings and " grads: " not in note.settings
    assert "glu_grads_gluon" not in launched(tokens=8192)[0]
    assert "glu_grads_gluon" not in launched(tokens=8193, D=4096, H=14336)[0]


@needs_gluon
def test_dx_of_few_tokens_stays_in_the_launch_where_it_has_no_kernel_of_its_own():
    """As with the rows of a table that knows of none."""
    with settings.override("dual_dgrad", family="tma"):
        assert launched(tokens=16)[0] == ["hidden_backward_small", "glu_grads_gluon"]
    with settings.override("dgrad", family="pair"):
        recorded, note = launched_of_two_layers(16, 1024, 4096)
        assert [entry.name for entry in recorded] == ["hidden_backward_small", "glu_grads_gluon"]
        assert note.backward[-1].startswith("dX, dW1 and dW2")
    with settings.override("glu_grads", family="gluon"):
        assert launched(tokens=16)[0] == ["hidden_backward_small", "glu_grads_gluon"]


@needs_gluon
def test_forced_to_share_a_launch_the_weights_do_so_without_dx():
    names, _ = launched(family="gluon", frozen=("x",))
    assert names == ["hidden_backward_gluon", "glu_grads_gluon"]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"family": "tma"},
        {"family": "pair"},
        {"family": "gluon", "dtype": torch.float32},
        {"family": "gluon", "H": 3076},
        {"family": "gluon", "D": 764},
        {"family": "gluon", "device": "nvidia-b200"},
        *({"family": "gluon", "frozen": (name,)} for name in NAMES[1:]),
    ],
    ids=str,
)
def test_everywhere_else_the_products_stay_apart(case):
    names, note = launched(**case)
    assert names[0].startswith(("glu_", "hidden_")) and "glu_grads_gluon" not in names
    if "frozen" not in case:
        assert len(note.backward) >= 4 and "grads:" not in note.settings


def launched_of_two_layers(tokens=1024, D=768, H=3072, D_out=640, dtype=torch.bfloat16, frozen=(), pad=0, **options):
    """What a backward of two layers launches of ours, and what is said of it."""
    device = options.pop("device", "nvidia-h200")

    def make(name: str, *shape: int) -> Tensor:
        room = pad if name == "fc1" else 0
        base = torch.empty(*shape[:-1], shape[-1] + room, dtype=dtype, device="meta")
        return base[..., : shape[-1]].requires_grad_(name not in frozen)

    x, fc1, fc2, b1, b2 = (
        make(*one) for one in (("x", tokens, D), ("fc1", H, D), ("fc2", D_out, H), ("b1", H), ("b2", D_out))
    )
    operands = (x, fc1, fc2, b1, b2)
    with settings.override(**options), pretended(DEVICES[device]) as recorded:
        note = explain_plan(lambda: functional.mlp(*operands, activation="gelu_tanh")).notes[0]
        y = functional.mlp(*operands, activation="gelu_tanh")
        del recorded[:]
        y.backward(torch.empty_like(y))
    assert [None if t.grad is None else t.grad.shape for t in operands] == [
        None if name in frozen else t.shape for name, t in zip(("x", "fc1", "fc2", "b1", "b2"), operands, strict=True)
    ]
    return recorded, note


@needs_gluon
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens, tile", [(16, 64), (640, 64), (1024, 128), (4096, 128)])
def test_two_layers_make_one_launch_of_their_products(tokens, tile, dtype):
    recorded, note = launched_of_two_layers(tokens, dtype=dtype, pad=16)
    assert len(recorded) == 2 and recorded[1].name == "glu_grads_gluon"
    assert len(note.backward) == 2 and note.backward[1].startswith(f"dX, dW1 and dW2 [gluon {tile}x128x64")
    assert "grads: gluon" in note.settings
    upper, lower = recorded[1].tiles[2], recorded[1].tiles[3]
    assert upper.shape == lower.shape == (1536, 768) and upper.strides == lower.strides == (784, 1)
    assert (upper.offset, lower.offset) == (0, 1536 * 784)
    assert recorded[1].tiles[8].shape == (tokens, 3072)  # h is as wide as both halves
    assert recorded[1].tiles[12].shape == (640, 3072)


@needs_gluon
@pytest.mark.parametrize("tokens, D, H, tile", [(64, 5120, 13824, 64), (128, 4096, 14336, 128), (128, 2304, 9216, 64)])
def test_wide_layers_of_two_do_so_for_few_tokens_too(tokens, D, H, tile):
    _, note = launched_of_two_layers(tokens, D, H)
    assert note.backward[-1].startswith(f"dX, dW1 and dW2 [gluon {tile}x128x64")


@needs_gluon
@pytest.mark.parametrize(
    "case, dx",
    [
        ({"tokens": 16, "D": 1024, "H": 4096}, "dX [small 16x"),
        ({"tokens": 64, "D": 4096, "H": 14336}, "dX [small 64x"),
        ({"tokens": 128, "D": 8192, "H": 28672}, "cuBLAS dX"),  # few tiles of long sums
        ({"tokens": 256, "frozen": ("x",)}, ""),
    ],
    ids=str,
)
def test_weights_of_two_layers_share_a_launch_without_dx_for_few_tokens(case, dx):
    recorded, note = launched_of_two_layers(**case)
    names = [entry.name for entry in recorded[1:]]
    assert names == ["glu_grads_gluon", *(["dual_dgrad_small"] if "small" in dx else [])]
    assert recorded[1].tiles.keys().isdisjoint((1, 3, 9))  # of dX
    if dx:  # of a note all gradients are wanted
        assert note.backward[-2].startswith("dW1 and dW2 [gluon 128x128x64") and note.backward[-1].startswith(dx)
        assert "wgrads: gluon" in note.settings and ("dgrad: small" in note.settings) is ("small" in dx)


@needs_gluon
@pytest.mark.parametrize(
    "case",
    [
        {"tokens": 4100},
        {"H": 3080},  # halves of no multiple of 16 bytes
        {"H": 3076},
        {"dtype": torch.float32},
        {"device": "nvidia-b200"},
        *({"frozen": (name,)} for name in ("x", "fc1", "fc2")),
    ],
    ids=str,
)
def test_products_of_two_layers_stay_apart_elsewhere(case):
    recorded, note = launched_of_two_layers(**case)
    assert "glu_grads_gluon" not in [entry.name for entry in recorded]
    if "frozen" not in case:
        assert note.backward[-3:] == ("cuBLAS dW2", "cuBLAS dX", "cuBLAS dW1") and "grads" not in note.settings
