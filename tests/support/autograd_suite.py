"""The autograd contract: what a fused operation owes to autograd's other users."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from .cases import DTYPES, pairwise
from .compare import assert_matches
from .fault_suite import SMALL, activation_of, parameters, three_ways
from .memory import poisoned_memory, unchanged
from .operations import ACTIVATIONS, OPERATIONS, WAYS, Tensors
from .runner import Outcome, compare, run_tensors

ops = pytest.mark.parametrize("op", list(OPERATIONS))
ways = pytest.mark.parametrize("op, options", list(WAYS.values()), ids=list(WAYS))
recomputing = pytest.mark.parametrize("op", [name for name, op in OPERATIONS.items() if "recompute" in op.options])
ROWS = 33


class KeepsOutput(torch.autograd.Function):
    """exp, with its output saved for its own backward."""

    @staticmethod
    def forward(ctx, z):
        out = z.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g * out


BEFORE = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda z: torch.softmax(z, -1),
    "custom": KeepsOutput.apply,
}


def leaves_of(op: str, dtype: torch.dtype, device: torch.device, rows: int = ROWS) -> Tensors:
    return {"x": torch.randn(rows, SMALL[op][0]).to(device, dtype)} | parameters(op, dtype, device)


def call(op: str, tensors: Tensors, **options) -> Tensor:
    return OPERATIONS[op].fused(tensors, activation_of(op), **options)


def requiring(leaves: Tensors) -> Tensors:
    return {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}


def gradients(op: str, leaves: Tensors, gy: Tensor, **options) -> dict[str, Tensor]:
    fresh = requiring(leaves)
    call(op, fresh, **options).backward(gy)
    return {name: t.grad for name, t in fresh.items()}


class HandedOutOnce:
    """Hooks on saved tensors that hand each out once, as those of offloading and checkpointing may."""

    def __init__(self) -> None:
        self.packed: list[Tensor | None] = []

    def pack(self, tensor: Tensor) -> int:
        self.packed.append(tensor)
        return len(self.packed) - 1

    def unpack(self, handle: int) -> Tensor:
        tensor, self.packed[handle] = self.packed[handle], None
        assert tensor is not None, f"saved tensor {handle} was unpacked a second time"
        return tensor


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor], what: str) -> None:
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), f"{what}: the gradient of {name} differs"


class AutogradSuite:
    @ways
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_requires_grad_patterns(self, device, op, options, dtype):
        """Gradients exactly where eager has them, and right there, whatever else is frozen."""
        leaves = leaves_of(op, dtype, device)
        gy = torch.randn(ROWS, SMALL[op][-1]).to(device, dtype)
        count = len(leaves)
        flags = dict.fromkeys(leaves, (True, False))
        patterns = pairwise(flags)
        if count <= 3:
            every = itertools.product((True, False), repeat=count)
            patterns = [dict(zip(leaves, pattern, strict=True)) for pattern in every]
        patterns += [{name: name == only for name in leaves} for only in leaves]

        def outcome(apply, to, pattern, **options):
            mine = {n: t.detach().clone().to(to).requires_grad_(pattern[n]) for n, t in leaves.items()}
            y = apply(mine, activation_of(op), **options)
            assert y.requires_grad == any(pattern.values())
            if y.requires_grad:
                y.backward(gy.to(to))
            return Outcome(y.detach(), {n: t.grad for n, t in mine.items()})

        for pattern in patterns:
            exact = outcome(OPERATIONS[op].plain, torch.float64, pattern)
            eager = outcome(OPERATIONS[op].plain, dtype, pattern)
            with poisoned_memory():
                ours = outcome(OPERATIONS[op].fused, dtype, pattern, **options)
            needing = [name for name, needs in pattern.items() if needs]
            compare(f"{op}, requires_grad {needing}", ours, eager, exact)

    @ops
    @pytest.mark.parametrize("needed", ["x", "weights"])
    def test_frozen_operands_cost_no_product(self, device, op, needed):
        """PyTorch's products in backward are no more than eager does for the same gradients."""
        leaves = leaves_of(op, torch.float32, device)

        def products(apply):
            mine = {n: t.clone().requires_grad_((n == "x") == (needed == "x")) for n, t in leaves.items()}
            y = apply(mine, activation_of(op))
            with FlopCounterMode(display=False) as counter:
                y.sum().backward()
            return counter.get_total_flops()

        assert products(OPERATIONS[op].fused) <= products(OPERATIONS[op].plain)

    @ops
    @pytest.mark.parametrize("wrt", ["x", "all"])
    def test_gradient_penalty(self, device, op, wrt):
        """Double backward: the gradient of a gradient's norm."""
        leaves = leaves_of(op, torch.float32, device, rows=9)

        def penalty(apply, to):
            def loss(t):
                names = ["x"] if wrt == "x" else list(t)
                y = apply(t, activation_of(op))
                first = torch.autograd.grad(y.pow(2).sum(), [t[n] for n in names], create_graph=True)
                return sum(g.pow(2).mean() for g in first)

            return run_tensors(leaves, to, loss)

        plain = OPERATIONS[op].plain
        exact, eager = penalty(plain, torch.float64), penalty(plain, torch.float32)
        ours = penalty(OPERATIONS[op].fused, torch.float32)
        compare(f"{op} penalty", ours, eager, exact, roundings=64)
        assert any(g.abs().max() > 0 for g in ours.gradients.values())

    @ways
    def test_second_backward_with_retain_graph(self, device, op, options):
        """The second backward gives what the first gave, bit for bit: nothing saved was written over."""
        leaves = requiring(leaves_of(op, torch.float32, device))
        y = call(op, leaves, **options)
        gy = torch.randn_like(y)
        first = torch.autograd.grad(y, list(leaves.values()), gy, retain_graph=True)
        second = torch.autograd.grad(y, list(leaves.values()), gy)
        for name, a, b in zip(leaves, first, second, strict=True):
            assert torch.equal(a, b), f"the second gradient of {name} differs"

    @ops
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_bitwise_reproducible(self, device, op, dtype):
        leaves = leaves_of(op, dtype, device, rows=150)
        gy = torch.randn(150, SMALL[op][-1]).to(device, dtype)
        first = gradients(op, leaves, gy)
        for _ in range(3 if device.type == "cuda" else 1):
            assert_same_bits(first, gradients(op, leaves, gy), "from run to run")

    @ways
    def test_saved_tensors_are_unpacked_once(self, device, op, options):
        """Offloading and checkpointing hooks may refuse to hand out a saved tensor twice."""
        leaves = requiring(leaves_of(op, torch.float32, device))
        hooks = HandedOutOnce()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            y = call(op, leaves, **options)
        assert hooks.packed, "nothing was saved"
        gy = torch.randn_like(y)
        y.backward(gy)
        plain = gradients(op, leaves, gy, **options)
        assert_same_bits(plain, {name: t.grad for name, t in leaves.items()}, "under the hooks")

    @ops
    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_checkpointing(self, device, op, use_reentrant, dtype):
        leaves = leaves_of(op, dtype, device)
        leaves["x"] = leaves["x"].reshape(3, 11, -1)
        gy = torch.randn(3, 11, SMALL[op][-1]).to(device, dtype)
        expected, fresh = gradients(op, leaves, gy), requiring(leaves)
        y = checkpoint(
            lambda *t: call(op, dict(zip(fresh, t, strict=True))),
            *fresh.values(),
            use_reentrant=use_reentrant,
        )
        y.backward(gy)
        assert_same_bits(expected, {name: t.grad for name, t in fresh.items()}, "checkpointed")

    @recomputing
    @pytest.mark.parametrize("activation", list(ACTIVATIONS))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_recompute_gives_the_same_gradients(self, device, op, activation, dtype):
        leaves = leaves_of(op, dtype, device)
        gy = torch.randn(ROWS, SMALL[op][-1]).to(device, dtype)

        def outcome(apply, to, **options):
            mine = {n: t.detach().clone().to(to).requires_grad_() for n, t in leaves.items()}
            y = apply(mine, activation, **options)
            y.backward(gy.to(to))
            return Outcome(y.detach(), {n: t.grad for n, t in mine.items()})

        plain = OPERATIONS[op].plain
        exact, eager = outcome(plain, torch.float64), outcome(plain, dtype)
        ours = outcome(OPERATIONS[op].fused, dtype, recompute=True)
        compare(f"{op} recomputed", ours, eager, exact)

    @ops
    @pytest.mark.parametrize("before", list(BEFORE))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_an_input_that_its_maker_saved(self, device, op, before, dtype):
        """The operation before kept its output for its own backward: it must still be whole then."""
        leaves = {"z": torch.randn(ROWS, SMALL[op][0]).to(device, dtype)} | parameters(op, dtype, device)
        three_ways(op, leaves, lambda apply, t: apply(BEFORE[before](t["z"])).pow(2).sum(), dtype, roundings=96)

    @pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
    def test_two_consumers_of_one_input(self, device, op):
        leaves = {"z": torch.randn(ROWS, SMALL[op][0]).to(device)} | parameters(op, torch.float32, device)

        def added(apply, t):
            h = t["z"].exp()
            return (apply(h) + h).pow(2).mean()

        def multiplied(apply, t):
            h = t["z"].tanh()
            return (apply(h) * apply(h * 0.5)).sum()

        three_ways(op, leaves, added, torch.float32)
        three_ways(op, leaves, multiplied, torch.float32, roundings=96)

    @ways
    def test_nothing_of_the_user_is_written_over(self, device, op, options):
        leaves = requiring(leaves_of(op, torch.bfloat16, device))
        gy = torch.randn(ROWS, SMALL[op][-1]).to(device, torch.bfloat16)
        with unchanged(leaves | {"gy": gy}) as check:
            y = call(op, leaves, **options)
            check("in forward")
            with unchanged({"y": y.detach()}):
                y.backward(gy)

    @ops
    def test_a_saved_input_changed_in_place_is_noticed(self, device, op):
        leaves = requiring(leaves_of(op, torch.float32, device))
        x = leaves["x"] * 1.0
        y = call(op, leaves | {"x": x})
        x.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @ops
    def test_modes_without_gradients_and_training_again(self, device, op):
        """no_grad and inference_mode calls between two training steps leave the second step right."""
        leaves = leaves_of(op, torch.float32, device)
        gy = torch.randn(ROWS, SMALL[op][-1]).to(device)
        first, fresh = gradients(op, leaves, gy), requiring(leaves)
        exact = OPERATIONS[op].plain({n: t.double() for n, t in leaves.items()}, activation_of(op))
        eager = OPERATIONS[op].plain(leaves, activation_of(op))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = call(op, fresh)
            assert not y.requires_grad and y.grad_fn is None
            assert_matches(f"{op} under {mode.__name__}", y, eager, exact)
        assert_same_bits(first, gradients(op, leaves, gy), "after inference")
