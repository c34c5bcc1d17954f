"""The backward's kernels for small batches in the interpreter: paddings, shared sums, biases, room in memory."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from support.cases import DTYPES, Case
from support.interpreter import repair
from support.memory import GRADIENT_LAYOUTS, poisoned_memory
from support.operations import ACTIVATIONS, OPERATIONS
from support.runner import check_op
from support.small_cases import CPU, forced_small, varied
from triton.runtime.interpreter import InterpreterBuilder

from fusedmlp import explain_plan, functional, plan, settings
from fusedmlp.activations import resolve_activation
from fusedmlp.launchers import small

repair()

TOKENS = (1, 2, 16, 17, 40, 64)
FROZEN = ("nothing", "x", "weights", "every_second")


@contextmanager
def forced(**fields):
    """The backward alone, and not as one launch for several products."""
    ops = ("glu_backward", "act_backward", "dual_dgrad", "dgrad")
    with settings.override("glu_grads", family="pair"), forced_small(*ops, **fields):
        yield


def varied_backward(i: int) -> dict[str, str]:
    return {"gradient_layout": GRADIENT_LAYOUTS[i % len(GRADIENT_LAYOUTS)], "frozen": FROZEN[i % len(FROZEN)]}


@pytest.mark.parametrize("op", ["glu_mlp", "mlp", "relu_mlp"])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("M", TOKENS)
def test_accuracy(op, M, splits):
    i = TOKENS.index(M) * 3 + splits
    with forced(parts=splits):
        for k in (i, i + 7, i + 13):
            check_op(varied(op, M, k, **varied_backward(k)), CPU)
        if "recompute" in OPERATIONS[op].options:
            check_op(varied(op, M, i + 5, **varied_backward(i + 5), recompute=True), CPU)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
def test_every_activation(op, activation, dtype):
    with forced(parts=2):
        check_op(Case(op, (5,), (40, 72, 24), activation, dtype=dtype), CPU)


@pytest.mark.parametrize("block", [{"block_n": 16, "block_k": 16}, {"block_n": 64, "block_k": 128}, {"block_m": 16}])
@pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
def test_accuracy_with_other_tiles(op, block):
    """block_m below the tokens: a program goes through several tiles of them, and sums biases over all."""
    with forced(parts=3, **block):
        check_op(Case(op, (40,), (75, 70, 50), "gelu", dtype=torch.bfloat16), CPU)


def test_the_launches_are_those():
    x, gate, down = (torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in ((5, 32), (48, 32), (32, 48)))
    with forced():
        text = str(explain_plan(functional.glu_mlp, x, gate, gate, down))
        assert "bias gradients [small 16x" in text and "dX over gate and up [small 16x" in text
        text = str(explain_plan(functional.mlp, x, gate, down))
        assert "bias gradients [small 16x" in text and "dX [small 16x" in text
        wide = x.detach().expand(13, 5, 32).reshape(65, 32).requires_grad_()
        assert "small" not in str(explain_plan(functional.glu_mlp, wide, gate, gate, down))


def dgrad(splits: int, M: int = 20, D: int = 70, H: int = 150) -> torch.Tensor:
    make = torch.Generator().manual_seed(0)
    dgate_up, gate, up = (torch.randn(s, generator=make) for s in ((M, 2 * H), (H, D), (H, D)))
    with forced(parts=splits):
        made = plan.Plan("glu_mlp", resolve_activation("gelu"), M, (), dgate_up.dtype, CPU, "ieee", True)
        made.choose("dgrad", "dual_dgrad", D, H)
    with poisoned_memory():
        return small.dual_dgrad(made, dgate_up, gate, up)


def test_the_order_of_arrival_does_not_show():
    """Programs run from the last to the first: the same bits, since partial sums are added in the splits' order."""
    expected = dgrad(4)
    original = InterpreterBuilder.set_grid_idx

    def backwards(self, i, *rest):
        return original(self, self.grid_dim[0] - 1 - i, *rest)

    with mock.patch.object(InterpreterBuilder, "set_grid_idx", backwards):
        assert torch.equal(dgrad(4), expected)


@pytest.mark.parametrize("splits", [2, 4, 7])
def test_counters_are_left_zero(splits):
    """7 splits of 5 steps: the last ones have nothing to add."""
    kept = []

    def counters(device, count):
        kept.append(torch.zeros(count, dtype=torch.int32))
        return kept[-1]

    with mock.patch.object(small, "barrier_counters", counters):
        dgrad(splits)
    assert len(kept) == 1 and not kept[0].any()


@pytest.mark.parametrize("make", [torch.randn, torch.rand])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_nan_and_inf_come_out_where_eager_has_them(value, make):
    """In the padding of tokens they must not: 0 * inf is NaN. Of one sign, they make the sums of a bias infinite."""
    x, gate, up, down = (make(s) for s in ((5, 24), (40, 24), (40, 24), (33, 40)))
    biases = [make(s) for s in (40, 40, 33)]
    for name in ("gate", "up", "down", "gy"):
        gy = make(5, 33)
        tensors = {"gate": gate.clone(), "up": up.clone(), "down": down.clone()}
        ({"gy": gy} | tensors)[name][3, 7] = value
        leaves = [t.clone().requires_grad_() for t in (x, *tensors.values(), *biases)]
        with forced(parts=2):
            ours = torch.autograd.grad(functional.glu_mlp(*leaves, activation="silu"), leaves, gy)
        g, u = leaves[0] @ leaves[1].t() + leaves[4], leaves[0] @ leaves[2].t() + leaves[5]
        y = (torch.nn.functional.silu(g) * u) @ leaves[3].t() + leaves[6]
        theirs = torch.autograd.grad(y, leaves, gy)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
