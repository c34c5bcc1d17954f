"""What was kept is written over by the last backward alone: each family of kernels in the interpreter."""

from unittest import mock

import pytest
import torch
from support.autograd_suite import leaves_of, requiring
from support.interpreter import repair
from support.operations import OPERATIONS
from support.spent_suite import SpentSuite, assert_same, grads, hidden
from support.steady_sim import Table, simulated

from fusedmlp import record, settings, steady
from fusedmlp.launchers import linear
from fusedmlp.operations import OPERATIONS as LAUNCHES
from fusedmlp.plan import Plan

repair()
CPU = torch.device("cpu")


@pytest.fixture
def device() -> torch.device:
    return CPU


@pytest.fixture(params=["pointer", "tma", "pair", "small"], autouse=True)
def family(request):
    with settings.override(family=request.param):
        yield request.param


class TestSpent(SpentSuite):
    pass


def step(op: str, leaves) -> list[torch.Tensor]:
    y = OPERATIONS[op].fused(leaves, "gelu")
    return grads(y, leaves, torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape))


@pytest.mark.parametrize("op", ["glu_mlp", "mlp", "linear_act"])
def test_memory_that_runs_out_while_a_backward_is_written_down(op):
    """The hidden layer's gradient is in its place by then, and the backward is run again without a record."""
    leaves = requiring(leaves_of(op, torch.bfloat16, CPU))
    plain, failed = LAUNCHES[op].backward, []

    def failing(*args):
        found = plain(*args)
        if record.current() is not None:
            failed.append(op)
            raise torch.OutOfMemoryError("out of memory")
        return found

    with simulated(), mock.patch.object(LAUNCHES[op], "backward", failing):
        right = step(op, leaves)
        for _ in range(4):
            assert_same(step(op, leaves), right, leaves)
    assert len(failed) == 1


@pytest.mark.parametrize("op", ["glu_mlp", "mlp", "linear_act"])
def test_a_backward_that_is_captured_may_be_replayed(op):
    leaves = requiring(leaves_of(op, torch.bfloat16, CPU))
    with simulated() as launcher:
        right = step(op, leaves)
        for captures in (True, False, True):
            capturing = mock.patch.object(Plan, "capturing", return_value=captures)
            with capturing, mock.patch.object(steady, "_served", return_value=not captures):
                for _ in range(4):
                    y = OPERATIONS[op].fused(leaves, "gelu")
                    kept = hidden(op, y)
                    before, ran = kept.clone(), sum(p.runs for p in launcher.programs)
                    gy = torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape)
                    with mock.patch.object(Table, "capturing", captures):
                        assert_same(grads(y, leaves, gy), right, leaves)
                    ran = sum(p.runs for p in launcher.programs) - ran
                assert torch.equal(kept, before) is captures
                assert captures or ran or op == "linear_act"


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_pair_works_in_place_where_nothing_is_kept(activation, family):
    """Inference has one [M, N] tensor, not two; what a backward needs is written over by nobody."""
    leaves, seen, plain = leaves_of("linear_act", torch.bfloat16, CPU), [], linear.activate

    def watched(plan, pre, act, out=None):
        seen.append(out is pre)
        return plain(plan, pre, act, out)

    with mock.patch.object(linear, "activate", watched):
        inference, training = (
            OPERATIONS["linear_act"].fused(given, activation) for given in (leaves, requiring(leaves))
        )
    # Of ReLU the output alone is kept.
    assert seen == ([True, activation == "relu"] if family == "pair" else [])
    assert torch.equal(inference, training)
    torch.testing.assert_close(inference, OPERATIONS["linear_act"].plain(leaves, activation), rtol=2e-2, atol=2e-2)
