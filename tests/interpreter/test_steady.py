"""Steady calls: the programs that calls are written down as compute what the long way does, from other tensors."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.autograd_suite import ROWS, HandedOutOnce, assert_same_bits, call, leaves_of, requiring
from support.cases import SMALL_LEADS, SMALL_WIDTHS, Case, covering_cases
from support.fault_suite import activation_of
from support.interpreter import repair
from support.operations import OPERATIONS
from support.runner import build, check_op, run
from support.steady_sim import simulated

from fusedmlp import plan, settings
from fusedmlp.plan import Plan

repair()

FAMILIES = ("tma", "pointer", "pair", "small")
CASES = [case for op in OPERATIONS for case in covering_cases(op, SMALL_LEADS, SMALL_WIDTHS)][::3]
# A family each, in turn, of those that serve the case.
PAIRS = [
    (case, ([f for f in FAMILIES if case.suits(f)])[i % (4 if case.suits("small") else 3)])
    for i, case in enumerate(CASES)
]


def warm_up(case: Case) -> None:
    """With other tensors: the first call compiles, the second forward and the third backward are written down."""
    operation = OPERATIONS[case.op]
    for seed in (1, 2, 3, 4):
        problem = build(replace(case, seed=case.seed + seed), "cpu")
        run(problem, lambda tensors: operation.fused(tensors, case.activation, **case.options))


@pytest.mark.parametrize("case, family", PAIRS, ids=lambda v: v.id if isinstance(v, Case) else v)
def test_accuracy(case, family):
    with settings.override(family=family), simulated() as launcher:
        warm_up(case)
        for _ in range(6):  # gate and up may lie in another order than before, which is another program
            before = sum(p.runs for p in launcher.programs)
            check_op(case, torch.device("cpu"))
            steady = sum(p.runs for p in launcher.programs) > before
            if steady:
                break
        eager = all(made.eager_reason is not None for made in plan._plans.values())
        assert not launcher.refused and (eager or steady)


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("moved", [False, True], ids=["a program suits", "none suits"])
def test_saved_tensors_are_unpacked_once(op, moved):
    """Hooks of offloading and checkpointing may hand a tensor out once, and in another layout than it was saved in."""
    leaves = requiring(leaves_of(op, torch.bfloat16, "cpu"))
    hooks = HandedOutOnce()

    def unpack(handle):
        tensor = hooks.unpack(handle)
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]] if moved and handle == 0 else tensor

    def step(pack, unpack) -> dict[str, torch.Tensor]:
        """Of the same tensors each time: where gate and up lie belongs to what a program is for."""
        for t in leaves.values():
            t.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = call(op, leaves)
        y.backward(torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape))
        return {name: t.grad for name, t in leaves.items()}

    with simulated() as launcher:
        exact = step(lambda t: t, lambda t: t)
        for _ in range(3):
            assert_same_bits(exact, step(lambda t: t, lambda t: t), "with hooks that do nothing")
        before = sum(p.runs for p in launcher.programs)
        assert_same_bits(exact, step(hooks.pack, unpack), "under the hooks")
        assert sum(p.runs for p in launcher.programs) - before == (1 if moved else 2)


@pytest.mark.parametrize("op", ["linear_act", "mlp"])
@pytest.mark.parametrize("training", [False, True])
def test_bias_and_relu_by_cublas(op, training):
    """A forward may then be two products of PyTorch's and nothing else, and is a program all the same."""
    by_cublas = mock.patch.object(Plan, "layer_op", return_value="linear_relu")
    with settings.override(family="pair"), by_cublas, simulated() as launcher:
        for seed in range(5):
            torch.manual_seed(seed)
            leaves = leaves_of(op, torch.bfloat16, "cpu")
            leaves = requiring(leaves) if training else leaves
            found = OPERATIONS[op].fused(leaves, "relu")
            right = OPERATIONS[op].plain(leaves, "relu")
            torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
            if training:
                gy = torch.linspace(-1, 1, found.numel()).to(found.dtype).view(found.shape)
                given = list(leaves.values())
                grads = zip(torch.autograd.grad(found, given, gy), torch.autograd.grad(right, given, gy), strict=True)
                for ours, theirs in grads:
                    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
        steps = [step for p in launcher.programs for step in p.steps]
        assert not launcher.refused and all(p.runs for p in launcher.programs)
        assert sum(step[:2] == ("call", torch._addmm_activation) for step in steps) == 1


@contextmanager
def losing(tokens: int):
    """Sums over the tokens lose the last two, as some of cuBLAS do, where these have no product of their own."""
    mm = torch.mm

    def lossy(a, b, **options):
        return mm(a[:, :-2], b[:-2], **options) if b.shape[0] == tokens else mm(a, b, **options)

    last = mock.patch.object(Plan, "last_tokens", return_value=2)
    with settings.override(family="pair"), mock.patch.object(torch, "mm", lossy), last, simulated() as launcher:
        yield launcher
        assert launcher.programs and not launcher.refused


LAST = [c for c in CASES if c.dtype == torch.bfloat16 and math.prod(c.lead) > 2 and c.frozen in ("nothing", "x")]
LAST = [c for c in LAST if c.weight_layout != "transpose"]  # which goes PyTorch's way


@pytest.mark.parametrize("case", LAST, ids=lambda case: case.id)
def test_last_tokens_apart(case):
    with losing(math.prod(case.lead)):
        warm_up(case)
        check_op(case, torch.device("cpu"))


WEIGHTS = {"linear_act": ["fc"], "glu_mlp": ["gate", "up", "down"], "mlp": ["fc1", "fc2"], "relu_mlp": ["layer1"]}
TRAINED = [(op, trained) for op, names in WEIGHTS.items() for trained in ("all", *names)]


@pytest.mark.parametrize("op, trained", TRAINED)
def test_every_weight_has_the_last_tokens(op, trained):
    """The upstream gradient is zero but for them: a gradient without them would be zero too."""
    torch.manual_seed(0)
    leaves = leaves_of(op, torch.bfloat16, "cpu")
    names = [name for name in leaves if trained in ("all", name.removesuffix("_weight"))]
    ours = leaves | requiring({name: leaves[name] for name in names})
    exact = requiring({name: t.double() for name, t in leaves.items()})
    plain = OPERATIONS[op].plain(exact, activation_of(op))
    gy = torch.zeros_like(plain)
    gy[-2:].normal_()
    plain.backward(gy)
    with losing(ROWS) as launcher:
        for _ in range(4):
            for name in names:
                ours[name].grad = None
            call(op, ours).backward(gy.bfloat16())
            for name in names:
                right = exact[name].grad
                assert (ours[name].grad - right).norm() < 0.1 * right.norm(), name
        assert sum(p.runs > 0 for p in launcher.programs) == 2  # a forward and a backward
