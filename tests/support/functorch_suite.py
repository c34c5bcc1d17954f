"""torch.func on the operations: the right values, or an error at the unsupported call; never wrong values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .autograd_suite import leaves_of
from .compare import relative_error
from .fault_suite import activation_of
from .operations import OPERATIONS, Tensors

ops = pytest.mark.parametrize("op", list(OPERATIONS))
REFUSALS = (RuntimeError, NotImplementedError)
REFUSAL_WORDS = ("vmap", "functorch", "forward", "jvp", "support")


class Layer(nn.Module):
    """The parameters of an operation, with its call."""

    def __init__(self, apply: Callable[..., Tensor], parameters: Tensors, activation: str) -> None:
        super().__init__()
        self.apply_op, self.activation = apply, activation
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_op(dict(self.named_parameters()) | {"x": x}, self.activation)


def right_or_refused(op: str, compute: Callable[[Callable[..., Tensor]], Tensor], may_refuse: bool) -> None:
    """compute(operation) must equal the oracle's to 1e-4, or raise and say what is unsupported."""
    wanted = compute(OPERATIONS[op].plain)
    try:
        ours = compute(OPERATIONS[op].fused)
    except REFUSALS as error:
        refusal = str(error)
        if not may_refuse or not any(word in refusal.lower() for word in REFUSAL_WORDS):
            raise
        return
    assert wanted.abs().max() > 0
    assert relative_error(ours, wanted) < 1e-4


class FunctorchSuite:
    # Set where plain PyTorch runs underneath, which supports everything.
    must_be_right = False

    @ops
    def test_func_grad(self, device, op):
        leaves = leaves_of(op, torch.float32, device, rows=9)

        def compute(apply):
            return torch.func.grad(lambda x: apply(leaves | {"x": x}, activation_of(op)).pow(2).sum())(leaves["x"])

        right_or_refused(op, compute, not self.must_be_right)

    @ops
    def test_vmap(self, device, op):
        leaves = leaves_of(op, torch.float32, device, rows=9)
        batch = torch.randn(3, 9, leaves["x"].shape[-1], device=device)

        def compute(apply):
            return torch.func.vmap(lambda x: apply(leaves | {"x": x}, activation_of(op)))(batch)

        right_or_refused(op, compute, not self.must_be_right)

    @ops
    def test_per_sample_gradients(self, device, op):
        leaves = leaves_of(op, torch.float32, device, rows=4)
        name = next(n for n in leaves if n.endswith("_weight"))

        def compute(apply):
            def loss(weight, row):
                return apply(leaves | {"x": row[None], name: weight}, activation_of(op)).pow(2).sum()

            return torch.func.vmap(torch.func.grad(loss), (None, 0))(leaves[name], leaves["x"])

        right_or_refused(op, compute, not self.must_be_right)

    @ops
    @pytest.mark.parametrize("interface", ["func", "dual"])
    def test_forward_mode(self, device, op, interface):
        leaves = leaves_of(op, torch.float32, device, rows=9)
        tangent = torch.randn_like(leaves["x"])

        def compute(apply):
            def function(x):
                return apply(leaves | {"x": x}, activation_of(op))

            if interface == "func":
                return torch.func.jvp(function, (leaves["x"],), (tangent,))[1]
            with torch.autograd.forward_ad.dual_level():
                y = function(torch.autograd.forward_ad.make_dual(leaves["x"], tangent))
                out = torch.autograd.forward_ad.unpack_dual(y).tangent
                return torch.zeros_like(y) if out is None else out

        right_or_refused(op, compute, not self.must_be_right)

    @ops
    def test_functional_call(self, device, op):
        """Other parameter values by name, with gradients to them; always supported."""
        leaves = leaves_of(op, torch.float32, device)
        x = leaves.pop("x")
        others = {name: (t * 1.5).requires_grad_() for name, t in leaves.items()}

        def compute(apply):
            layer = Layer(apply, leaves, activation_of(op))
            y = torch.func.functional_call(layer, others, (x,))
            grads = torch.autograd.grad(y.pow(2).sum(), list(others.values()))
            assert all(p.grad is None for p in layer.parameters())
            return torch.cat([g.flatten() for g in grads])

        right_or_refused(op, compute, may_refuse=False)
