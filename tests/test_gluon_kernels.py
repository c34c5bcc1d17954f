"""The warp-specialised kernels in the simulator of their barriers, rings and TMA accesses, against float64.

The simulator knows nothing of layouts and registers; tests/test_aot.py compiles the same kernels, tests/gpu runs them.
"""

from __future__ import annotations

import pytest
import torch
from support import gluon_sim
from support.gluon_sim import Descriptor, launch
from torch import Tensor

from fusedmlp.activations import ACTIVATIONS

FORWARD, BACKWARD = "fusedmlp.kernels.gluon.hidden_forward", "fusedmlp.kernels.gluon.hidden_backward"
BLOCK = 16
# M, H, K, programs: ragged in all dimensions, one tile, more programs than tiles, an odd number of tiles a program.
SHAPES = [(40, 72, 80, 2), (16, 16, 16, 1), (17, 24, 40, 7), (70, 40, 36, 3), (40, 72, 20, 1)]
ACTS = ["gelu_tanh", "relu", "silu"]


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def check(found: Tensor, exact: Tensor) -> None:
    assert float((found.double() - exact).norm() / exact.norm()) < 2e-6


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("pingpong, stages, buffers, columns", [(True, 2, 1, 16), (True, 4, 2, 8), (False, 3, 2, 8)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glu(shape, pingpong, stages, buffers, columns, biases):
    kernel = gluon_sim.load(FORWARD).hidden_forward_gluon
    M, H, K, programs = shape
    act = ACTS[M % 3]
    x, gate_weight, up_weight = torch.randn(M, K), torch.randn(H, K), torch.randn(H, K)
    bias = (torch.randn(H), torch.randn(H)) if biases else (None, None)
    gate = x.double() @ gate_weight.double().T + (bias[0].double() if biases else 0)
    up = x.double() @ up_weight.double().T + (bias[1].double() if biases else 0)
    for seed, (save, store_h) in enumerate([(True, True), (False, True), (True, False)]):
        h, gate_up = poisoned(M, H), poisoned(M, 2 * H)
        halves = gate_up[:, :H], gate_up[:, H:]
        box = (BLOCK, columns)
        outs = [Descriptor(t, box) for t in (h, *halves)]
        operands = [Descriptor(t, (BLOCK, BLOCK)) for t in (x, gate_weight, up_weight)]
        flags = (stages, buffers, 2, act, save, store_h, False, pingpong)
        launch(kernel, programs, 4 if pingpong else 8, *operands, *bias, *outs, M, H, K, *flags, seed=seed)
        if save:
            check(halves[0], gate)
            check(halves[1], up)
        if store_h:
            check(h, ACTIVATIONS[act].fn(gate) * up)
        assert bool(h.isnan().all()) is not store_h
        assert bool(gate_up.isnan().all()) is not save


@pytest.mark.parametrize("pingpong, stages, buffers, columns", [(True, 2, 1, 16), (True, 4, 2, 8), (False, 3, 2, 4)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_act(shape, pingpong, stages, buffers, columns):
    kernel = gluon_sim.load(FORWARD).hidden_forward_gluon
    M, N, K, programs = shape
    act = ACTS[N % 3]
    x, weight, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    for seed, (given, save) in enumerate([(bias, True), (None, False)]):
        exact = x.double() @ weight.double().T + (0 if given is None else bias.double())
        y, pre = poisoned(M, N), poisoned(M, N)
        outs = Descriptor(y, (BLOCK, columns)), Descriptor(pre, (BLOCK, columns)), None
        operands = Descriptor(x, (BLOCK, BLOCK)), Descriptor(weight, (BLOCK, BLOCK)), None
        flags = (stages, buffers, 2, act, save, True, False, pingpong)
        launch(kernel, programs, 4 if pingpong else 8, *operands, given, None, *outs, M, N, K, *flags, seed=seed)
        check(y, ACTIVATIONS[act].fn(exact))
        if save:
            check(pre, exact)
        else:
            assert pre.isnan().all()


@pytest.mark.parametrize("store_a", [True, False])
@pytest.mark.parametrize("name", ["relu", "gelu_tanh"])  # keeps its output; keeps its input
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_act_backward(shape, name, store_a):
    """Without biases on the shape's programs, with them on one: a grid barrier waits for all of them."""
    kernel = gluon_sim.load(BACKWARD).hidden_backward_gluon
    M, N, K, programs = shape
    act = ACTIVATIONS[name]
    gy, weight, pre = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N).requires_grad_()
    a = act.fn(pre.double())
    a.backward(gy.double() @ weight.double())
    for biases in (False, True):
        saved = (a.detach().float() if act.saves == "output" else pre.detach()).clone()
        dpre, made = poisoned(M, N), poisoned(M, N)
        chunk = (8, 8)
        descriptors = [Descriptor(gy, (BLOCK, BLOCK)), Descriptor(weight, (BLOCK, BLOCK)), Descriptor(saved, chunk)]
        descriptors += [None, Descriptor(dpre, chunk), None, Descriptor(made, chunk)]
        db, db_out = poisoned(N), poisoned(K)
        sums = (
            poisoned(-(-M // BLOCK) * 2, N),
            None,
            poisoned(2, K),
            db,
            None,
            db_out,
            torch.zeros(2, dtype=torch.int32),
        )
        flags = (3, 4, 2, name, act.saves == "output", store_a, biases, biases, False)
        launch(kernel, 1 if biases else programs, 4, *descriptors, gy, *sums, M, N, K, 2, *flags)
        check(dpre, pre.grad.double())
        if store_a:
            check(made, a.detach())
        else:
            assert made.isnan().all()
        if biases:
            check(db, pre.grad.double().sum(0))
            check(db_out, gy.double().sum(0))
        else:
            assert db.isnan().all() and db_out.isnan().all()


@pytest.mark.parametrize(
    "rows, columns, stages, slots", [(8, 8, 2, 2), (16, 8, 4, 3), (8, 4, 3, 4), (16, 16, 2, 1), (16, 16, 2, 3)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glu_backward(shape, rows, columns, stages, slots):
    M, H, K, programs = shape
    act = ACTIVATIONS[ACTS[H % 3]]
    for seed, (store_h, spent) in enumerate([(True, False), (False, False), (True, True)]):
        case = Backward(M, H, K, act, spent)
        chunk = (rows, columns)
        case.launch(
            programs, chunk, (None,) * 8, (stages, slots, 2, act.name, False, store_h, False, False, False), seed
        )
        case.check(store_h)


@pytest.mark.parametrize("bias_grad, down_bias_grad", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glu_backward_with_biases(shape, bias_grad, down_bias_grad):
    """One program: the simulator runs programs one after another, and a grid barrier waits for all of them."""
    M, H, K, _ = shape
    act = ACTIVATIONS[ACTS[K % 3]]
    case = Backward(M, H, K, act)
    parts, bands = 3, -(-M // BLOCK) * 2
    sums = poisoned(bands, H), poisoned(bands, H), poisoned(parts, K)
    grads = poisoned(H), poisoned(H), poisoned(K)
    counters = torch.zeros(2, dtype=torch.int32)
    pointers = (case.gy, *sums, *grads, counters)
    flags = (2, 3, 2, act.name, False, True, bias_grad, down_bias_grad, False)
    case.launch(1, (8, 8), pointers, flags, gy_parts=parts)
    case.check(True)
    for found, exact, asked in [
        (grads[0], case.gate.grad.sum(0), bias_grad),
        (grads[1], case.up.grad.sum(0), bias_grad),
        (grads[2], case.gy.double().sum(0), down_bias_grad),
    ]:
        if asked:
            check(found, exact)
        else:
            assert found.isnan().all()
    assert not counters.any()  # as they were found, for the next launch


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_infinite_weight_spoils_no_sum_of_a_bias(shape):
    """All is positive: in the padding 0 * inf would make NaN of sums that are infinite."""
    M, H, K, _ = shape
    case = Backward(M, H, K, ACTIVATIONS["silu"])
    for t in (case.gy, case.down, case.kept):
        t.abs_()
    case.down[2, 3] = torch.inf
    bands = -(-M // BLOCK) * 2
    grads = poisoned(H), poisoned(H)
    pointers = (case.gy, poisoned(bands, H), poisoned(bands, H), None, *grads, None, torch.zeros(2, dtype=torch.int32))
    case.launch(1, (8, 8), pointers, (2, 3, 2, "silu", False, True, True, False, False))
    for found in grads:
        assert found.isposinf().nonzero().tolist() == [[3]] and not found.isnan().any()


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_formulas_for_16_bits(name):
    """What kernels compute with results of 16 bits, by exact instructions: the value and the derivative. Where the
    distribution is 0 for PyTorch, which subtracts from 1, ours is smaller than 1e-7 as well."""
    kernel = gluon_sim.load(BACKWARD).hidden_backward_gluon
    act = ACTIVATIONS[name]
    M, N, K = 16, 64, 16
    gy, weight = torch.eye(16), torch.ones(K, N)
    pre = torch.cat([torch.linspace(-12, 12, M * N - 8), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 40, -40, 90, -90])])
    pre = pre.view(M, N).requires_grad_()
    exact = act.fn(pre.double())
    exact.backward(torch.ones(M, N, dtype=torch.float64))
    saved = (exact.detach().float() if act.saves == "output" else pre.detach()).clone()
    dpre, made = poisoned(M, N), poisoned(M, N)
    descriptors = [Descriptor(gy, (BLOCK, BLOCK)), Descriptor(weight, (BLOCK, BLOCK)), Descriptor(saved, (16, 16))]
    descriptors += [None, Descriptor(dpre, (16, 16)), None, Descriptor(made, (16, 16))]
    flags = (2, 2, 2, name, act.saves == "output", True, False, False, True)
    launch(kernel, 1, 4, *descriptors, *(None,) * 8, M, N, K, 0, *flags)
    torch.testing.assert_close(made.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dpre, pre.grad, rtol=1e-6, atol=1e-6)


class Backward:
    """Operands of the gated backward, its outputs poisoned or (``spent``) in the place of what was saved, and the
    exact gradients."""

    def __init__(self, M: int, H: int, K: int, act, spent: bool = False) -> None:
        self.sizes, self.name = (M, H, K), act.name
        self.gy, self.down = torch.randn(M, K), torch.randn(K, H)
        self.saved = torch.randn(M, 2 * H)
        self.gate, self.up = (t.double().requires_grad_() for t in (self.saved[:, :H], self.saved[:, H:]))
        self.exact = act.fn(self.gate) * self.up
        self.exact.backward(self.gy.double() @ self.down.double())
        self.h, self.kept = poisoned(M, H), self.saved.clone()
        self.grads = self.kept if spent else poisoned(M, 2 * H)

    def launch(self, programs: int, chunk: tuple[int, int], pointers, flags, seed: int = 0, gy_parts: int = 0) -> None:
        kernel = gluon_sim.load(BACKWARD).hidden_backward_gluon
        H = self.sizes[1]
        halves = (self.kept[:, :H], self.kept[:, H:], self.grads[:, :H], self.grads[:, H:], self.h)
        descriptors = [Descriptor(t, (BLOCK, BLOCK)) for t in (self.gy, self.down)]
        descriptors += [Descriptor(t, chunk) for t in halves]
        launch(kernel, programs, 4, *descriptors, *pointers, *self.sizes, gy_parts, *flags, seed=seed)

    def check(self, store_h: bool) -> None:
        H = self.sizes[1]
        check(self.grads[:, :H], self.gate.grad)
        check(self.grads[:, H:], self.up.grad)
        if self.grads is not self.kept:
            assert torch.equal(self.kept, self.saved)  # what was saved stays as it is
        if store_h:
            check(self.h, self.exact.detach())
        else:
            assert self.h.isnan().all()


FAULTS = [
    (BACKWARD, "        take_turn(turns, own_tile, WHO)\n", ""),
    (BACKWARD, "        pass_turn(turns, WHO)\n", ""),
    (BACKWARD, "        acc = finish(acc, empty, step + steps, STAGES)\n", ""),
    (BACKWARD, "        step += 2 * steps\n", "        step += steps\n"),
    (BACKWARD, "    tma.store_wait((LAG - 1) * STORES)\n", ""),
    (BACKWARD, "(LAG - 1) * STORES", "LAG * STORES"),
    (BACKWARD, "pred=i >= first + LAG", "pred=True"),
    (BACKWARD, "h_bufs.index(i % LAG)", "h_bufs.index(0)"),
    (BACKWARD, "i + SLOTS - LAG, SLOTS, pred", "i + SLOTS - 1, SLOTS, pred"),
    (BACKWARD, "pred=i - LAG + k >= first", "pred=True"),
    (BACKWARD, "            p1 = p2\n            p2 = p3\n", "            p1 = p2\n"),
    (BACKWARD, "// ACROSS * ROWS", "* ROWS"),
    (BACKWARD, "        tma.store_wait(0)\n        for k", "        for k"),
    (BACKWARD, "    fence_async_shared()\n    async_store(dgate", "    async_store(dgate"),
    (BACKWARD, "    wait_full(full, i, SLOTS)\n", ""),
    (BACKWARD, "            wait_empty(empty, i, SLOTS)\n", ""),
    (BACKWARD, "(c // ACROSS) * ROWS", "(c % ACROSS) * ROWS"),
    (BACKWARD, "num_outstanding=1", "num_outstanding=2"),
    (FORWARD, "x_desc.block_type.nbytes + 2 * gate", "x_desc.block_type.nbytes + gate"),
    (FORWARD, "        if CONSUMERS == 2:\n            take_turn(turns, own_tile, WHO)\n", ""),
    (FORWARD, "    tma.store_wait(BUFFERS - 1)\n", ""),
    (FORWARD, "    tma.store_wait(0)\n", ""),
    (FORWARD, "(own_tile & 1) ^ (1 - WHO)", "(own_tile & 1) ^ WHO"),
    (FORWARD, "                g0, g1, g2 = g1, g2, g3\n", ""),
    (FORWARD, "gl.cdiv(H - column, PART)", "gl.cdiv(H - column, PART) - 1"),
]


@pytest.mark.parametrize("module, right, wrong", FAULTS, ids=lambda text: text.strip()[:40])
def test_faults_are_noticed(module, right, wrong, monkeypatch):
    """The tests above can fail: each of these changes makes one of them do so."""
    plain = gluon_sim.load
    plain(module, {right: wrong})  # the text is there
    monkeypatch.setattr(gluon_sim, "load", lambda name: plain(name, {right: wrong}))
    monkeypatch.setattr(gluon_sim, "LIMIT", 5.0)

    def all_shapes():
        for shape in SHAPES:
            if module == FORWARD:
                test_glu(shape, True, 2, 1, 8, False)
            else:
                for chunk in ((8, 8, 2, 2), (8, 4, 2, 4), (16, 16, 2, 3)):
                    test_glu_backward(shape, *chunk)

    with pytest.raises((AssertionError, TimeoutError)):
        all_shapes()
