"""A backward that nobody repeats writes over what was kept for it; one that may be repeated, or watched, does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedmlp
from fusedmlp import plan
from fusedmlp.operations import OPERATIONS as LAUNCHES

from .autograd_suite import leaves_of, requiring
from .cases import DTYPES
from .fault_suite import SMALL
from .memory import poisoned_memory
from .operations import OPERATIONS, WAYS, Tensors

SPENT = [(way, op, options) for way, (op, options) in WAYS.items() if op in ("glu_mlp", "mlp", "linear_act")]
SPENT = [case for case in SPENT if not case[2].get("recompute")]
spent = pytest.mark.parametrize("op, options", [case[1:] for case in SPENT], ids=[case[0] for case in SPENT])
ROWS = 60  # the kernels for small batches take 64


def made(
    op: str, dtype: torch.dtype, device: torch.device, rows: int = ROWS, **options
) -> tuple[Tensors, Tensor, Tensor]:
    """Leaves, the result, and its gradient."""
    leaves = requiring(leaves_of(op, dtype, device, rows=rows))
    y = OPERATIONS[op].fused(leaves, "gelu_tanh", **options)
    return leaves, y, torch.randn(rows, SMALL[op][-1]).to(device, dtype)


def hidden(op: str, y: Tensor) -> Tensor:
    """What was kept of the hidden layer first: gate and up, or the pre-activation."""
    return y.grad_fn.saved_tensors[1 + {"glu_mlp": 3, "mlp": 2, "linear_act": 1}[op]]  # type: ignore[union-attr]


def grads(y: Tensor, leaves: Tensors, gy: Tensor, **options) -> list[Tensor]:
    with poisoned_memory():
        return list(torch.autograd.grad(y, list(leaves.values()), gy, **options))


def assert_same(found: list[Tensor], right: list[Tensor], names: Tensors) -> None:
    for name, a, b in zip(names, found, right, strict=True):
        assert torch.equal(a, b), f"the gradient of {name} differs"
        assert a.isfinite().all()


class SpentSuite:
    @spent
    @pytest.mark.parametrize("rows", [ROWS, 170])
    def test_only_the_last_backward_writes_over_it(self, device, op, options, rows):
        leaves, y, gy = made(op, torch.bfloat16, device, rows, **options)
        kept = hidden(op, y)
        before = kept.clone()
        first = grads(y, leaves, gy, retain_graph=True)
        assert torch.equal(kept, before)
        assert_same(grads(y, leaves, gy, retain_graph=True), first, leaves)
        assert torch.equal(kept, before)
        assert_same(grads(y, leaves, gy), first, leaves)
        assert not torch.equal(kept, before), "there was room, and it was not used"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("activation", ["relu", "sigmoid", "gelu"])
    @pytest.mark.parametrize("op", ["glu_mlp", "mlp", "linear_act"])
    def test_bits(self, device, op, activation, dtype):
        """Of activations that keep their output for backward, too, which the products after it still need."""
        leaves = requiring(leaves_of(op, dtype, device, rows=ROWS))
        y = OPERATIONS[op].fused(leaves, activation)
        gy = torch.randn(ROWS, SMALL[op][-1]).to(device, dtype)
        first = grads(y, leaves, gy, retain_graph=True)
        result = y.detach().clone()
        assert_same(grads(y, leaves, gy), first, leaves)
        assert torch.equal(y, result)

    @spent
    @pytest.mark.parametrize("frozen", ["x", "weights", "all but the last weight"])
    def test_bits_of_some_gradients(self, device, op, options, frozen):
        leaves, y, gy = made(op, torch.bfloat16, device, **options)
        last = [n for n, t in leaves.items() if t.dim() == 2][-1]
        wanted = {
            "x": {n: t for n, t in leaves.items() if n != "x"},
            "weights": {"x": leaves["x"]},
            "all but the last weight": {last: leaves[last]},
        }[frozen]
        first = grads(y, wanted, gy, retain_graph=True)
        assert_same(grads(y, wanted, gy), first, wanted)

    @spent
    def test_hooks_may_hold_on_to_it(self, device, op, options):
        """Offloading, checkpointing, or a look at what a network keeps: what they were handed stays as it is."""
        seen: list[tuple[Tensor, Tensor]] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append((tensor, tensor.detach().clone()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            leaves, y, gy = made(op, torch.bfloat16, device, **options)
        grads(y, leaves, gy)
        assert len(seen) > len(leaves) // 2
        for now, then in seen:
            assert torch.equal(now, then)

    @spent
    @pytest.mark.parametrize("retain", [True, False])
    def test_a_backward_that_failed(self, device, op, options, retain, monkeypatch):
        """Memory runs out when the hidden layer's gradient is there: PyTorch keeps what it saved for another try."""
        plan.clear()  # a backward that another test has had written down would not come by the launches
        leaves, y, gy = made(op, torch.bfloat16, device, **options)
        right = grads(y, leaves, gy, retain_graph=True)
        plain = LAUNCHES[op].backward

        def failing(*args, **kwargs):
            plain(*args, **kwargs)
            raise torch.OutOfMemoryError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(LAUNCHES[op], "backward", failing)
            with pytest.raises(torch.OutOfMemoryError):
                grads(y, leaves, gy, retain_graph=retain)
        if retain:
            assert_same(grads(y, leaves, gy), right, leaves)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                grads(y, leaves, gy)

    def test_the_input_of_a_layer_is_no_room(self, device):
        """Two layers in a row: the first one's result is the second one's input, and both backwards are the last."""
        leaves = requiring(leaves_of("mlp", torch.bfloat16, device, rows=ROWS))
        weight = (torch.randn(24, SMALL["mlp"][-1]) / 10).to(device, torch.bfloat16).requires_grad_()
        middle = OPERATIONS["mlp"].fused(leaves, "gelu_tanh")
        y = fusedmlp.linear_act(middle, weight, None, "gelu_tanh")
        gy = torch.randn(ROWS, 24).to(device, torch.bfloat16)
        wanted = leaves | {"weight": weight}
        first = grads(y, wanted, gy, retain_graph=True)
        value = middle.detach().clone()
        assert_same(grads(y, wanted, gy), first, wanted)
        assert torch.equal(middle, value)
