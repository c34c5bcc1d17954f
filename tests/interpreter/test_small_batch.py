"""The kernels for small batches in the interpreter: every token count's padding, split-K, what they leave behind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.cases import Case
from support.compare import assert_matches
from support.interpreter import repair
from support.memory import poisoned_memory
from support.operations import ACTIVATIONS, OPERATIONS
from support.runner import check_op
from support.small_cases import CPU, forced_small, varied
from triton.runtime.interpreter import InterpreterBuilder

from fusedmlp import explain_plan, functional, launch, launchers, plan
from fusedmlp.activations import resolve_activation
from fusedmlp.launchers import small

repair()

TOKENS = (1, 2, 3, 16, 17, 33, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BIASES = ("all", "none", "first", "last")


def forced(**fields):
    return forced_small(None, **fields)


@pytest.mark.parametrize("op", ["glu_mlp", "mlp", "linear_act", "relu_mlp"])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("M", TOKENS)
def test_accuracy(op, M, splits):
    i = TOKENS.index(M) * 3 + splits
    with forced(parts=splits):
        check_op(varied(op, M, i), CPU)
        recompute = {"recompute": True} if "recompute" in OPERATIONS[op].options else {}
        check_op(varied(op, M, i + 5, frozen="weights", **recompute), CPU)
        with torch.no_grad():
            check_op(varied(op, M, i + 10), CPU)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_activation_of_the_gated_kernel(activation, dtype):
    with forced(parts=2):
        check_op(Case("glu_mlp", (5,), (40, 72, 24), activation, dtype=dtype), CPU)


@pytest.mark.parametrize("block", [{"block_n": 16, "block_k": 16}, {"block_n": 64, "block_k": 128}, {"block_m": 16}])
def test_accuracy_with_other_tiles(block):
    """block_m below the tokens: several tiles of them, each with counters of its own."""
    with forced(parts=3, **block):
        check_op(Case("glu_mlp", (40,), (75, 70, 50), "gelu", dtype=torch.bfloat16), CPU)


def operands(M: int, K: int, N: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(M, K).to(dtype),
        (torch.randn(N, K) * K**-0.5).to(dtype),
        torch.randn(N).to(dtype),
    )


def linear(x, weight, bias, activation: str, splits: int, save: bool = False):
    """The kernel by itself, with any activation."""
    with forced(parts=splits):
        made = plan.Plan("mlp", resolve_activation(activation), x.shape[0], (), x.dtype, CPU, "ieee", True)
        made.choose("down", "down", *weight.shape)
    with poisoned_memory():
        return small.linear_act_small(made, "down", x, weight, bias, activation, save)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_layer_with_its_activation(activation, splits):
    for i, dtype in enumerate(DTYPES):
        x, weight, bias = operands((3, 17, 64)[i], 150, 70, dtype)
        y, pre = linear(x, weight, bias, activation, splits, save=True)

        def plain(to: torch.dtype, which: str = activation, all_of=(x, weight, bias)) -> torch.Tensor:
            return ACTIVATIONS[which](torch.nn.functional.linear(*(t.to(to) for t in all_of)))

        assert_matches("y", y, plain(dtype), plain(torch.float64))
        assert pre is not None
        assert_matches("pre", pre, plain(dtype, "identity"), plain(torch.float64, "identity"))


@pytest.mark.parametrize("splits", [2, 4, 7])
def test_results_repeat_and_counters_are_left_zero(splits):
    """7 splits of 5 steps: the last ones have nothing to add."""
    x, weight, bias = operands(33, 150, 70, torch.bfloat16)
    kept = []

    def counters(device, count):
        kept.append(torch.zeros(count, dtype=torch.int32) if not kept else kept[0])
        return kept[0]

    with mock.patch.object(small, "barrier_counters", counters):
        first, _ = linear(x, weight, bias, "identity", splits)
        assert not kept[0].any()
        second, _ = linear(x, weight, bias, "identity", splits)
    assert len(kept) == 2
    assert not kept[0].any()
    assert torch.equal(first, second)


def test_the_order_of_arrival_does_not_show():
    """Programs run from the last to the first: the same bits, since partial sums are added in the splits' order."""
    x, weight, bias = operands(20, 150, 70, torch.float32)
    expected, _ = linear(x, weight, bias, "identity", 4)
    original = InterpreterBuilder.set_grid_idx

    def backwards(self, i, *rest):
        return original(self, self.grid_dim[0] - 1 - i, *rest)

    with mock.patch.object(InterpreterBuilder, "set_grid_idx", backwards):
        found, _ = linear(x, weight, bias, "identity", 4)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_one_split_needs_neither_scratch_nor_counters(splits):
    given = []
    with mock.patch.object(launch.Launch, "__call__", lambda self, device, *args: given.append(args)):
        linear(*operands(8, 64, 32, torch.float32), "identity", splits)
    assert [tensor is None for tensor in given[0][5:7]] == [splits == 1] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
def test_nan_and_inf_come_out_where_eager_has_them(value, splits):
    x, gate, _ = operands(5, 70, 90, torch.float32)
    _, up, _ = operands(5, 70, 90, torch.float32)
    _, down, _ = operands(5, 90, 33, torch.float32)
    for into in (x, gate, down):
        kept = into[3, 7].item()
        into[3, 7] = value
        with forced(parts=splits):
            ours = functional.glu_mlp(x, gate, up, down, activation="silu")
        theirs = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        into[3, 7] = kept
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_more_tokens_and_other_operations_take_another_family():
    x, gate, bias = operands(257, 32, 48, torch.float32)
    with forced():
        text = str(explain_plan(functional.glu_mlp, x, gate, gate, gate.t().contiguous()))
        assert "small" not in text
        assert "cuBLAS down" in text
        text = str(explain_plan(functional.glu_mlp, x[:65], gate, gate, gate.t().contiguous()))
        assert "down [small 64x" in text  # which takes more than the first layer's kernel
        assert "product [small" not in text
        text = str(explain_plan(functional.glu_mlp, x[:64], gate, gate, gate.t().contiguous()))
        assert "gate, up, activation and product [small 64x" in text
        assert "down [small 64x" in text
        text = str(explain_plan(functional.mlp, x[:2], gate, gate.t().contiguous(), bias))
        assert "fc2 [small 16x" in text
        assert "fc1, bias and activation [small 16x" in text


def test_unforced_calls_take_cublas_for_the_last_product():
    x, gate, _ = operands(2, 32, 48, torch.bfloat16)
    with mock.patch.object(launchers.small, "linear_act_small", side_effect=AssertionError):
        functional.glu_mlp(x, gate, gate, gate.t().contiguous())
