"""Autocast: dtypes and values as eager's, with the backward outside of the autocast region."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .compare import PLENTY
from .fault_suite import SMALL, activation_of, parameters
from .operations import OPERATIONS, Tensors
from .runner import Outcome, compare

ops = pytest.mark.parametrize("op", list(OPERATIONS))
autocast_dtypes = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
ROWS = 50


def outcome(op: str, apply, leaves: Tensors, gy: torch.Tensor, low, frozen=(), wrap=None, **autocast) -> Outcome:
    mine = {
        name: None if t is None else t.detach().clone().requires_grad_(name not in frozen) for name, t in leaves.items()
    }
    with torch.autocast(gy.device.type, dtype=low, **autocast):
        if wrap is None:
            y = apply(mine, activation_of(op))
        else:
            y = wrap(lambda *t: apply(dict(zip(mine, t, strict=True)), activation_of(op)), *mine.values())
    y.backward(gy.to(y.dtype))
    return Outcome(y.detach(), {n: None if t is None else t.grad for n, t in mine.items()})


def check(op: str, device, low, x_dtype=torch.float32, dtype=torch.float32, bias=True, **options) -> Outcome:
    leaves: Tensors = {"x": torch.randn(ROWS, SMALL[op][0]).to(device, x_dtype)}
    for name, tensor in parameters(op, dtype, device).items():
        leaves[name] = tensor if bias or name.endswith("_weight") else None
    gy = torch.randn(ROWS, SMALL[op][-1], device=device)
    doubled = {n: None if t is None else t.double() for n, t in leaves.items()}
    exact = outcome(
        op, OPERATIONS[op].plain, doubled, gy.double(), low, frozen=options.get("frozen", ()), enabled=False
    )
    eager = outcome(op, OPERATIONS[op].plain, leaves, gy, low, **options)
    ours = outcome(op, OPERATIONS[op].fused, leaves, gy, low, **options)
    compare(f"{op} under autocast", ours, eager, exact, roundings=PLENTY // 16)
    return ours


class AutocastSuite:
    @ops
    @autocast_dtypes
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("x_is_low", [True, False])
    def test_fp32_parameters(self, device, op, low, bias, x_is_low):
        """Output in the autocast dtype; parameter gradients fp32; dx in the dtype of x."""
        x_dtype = low if x_is_low else torch.float32
        ours = check(op, device, low, x_dtype, bias=bias)
        assert ours.output.dtype is low
        assert ours.gradients["x"].dtype is x_dtype
        weights = {n: g for n, g in ours.gradients.items() if n != "x" and g is not None}
        assert weights and all(g.dtype is torch.float32 for g in weights.values())

    @ops
    def test_an_input_of_the_other_16_bit_type(self, device, op):
        """fp16 input in a bf16 region: computed in bf16, the gradient of x back in fp16."""
        ours = check(op, device, torch.bfloat16, torch.float16)
        assert ours.output.dtype is torch.bfloat16 and ours.gradients["x"].dtype is torch.float16

    @ops
    @autocast_dtypes
    def test_without_the_weight_cache(self, device, op, low):
        assert check(op, device, low, cache_enabled=False).output.dtype is low

    @ops
    def test_disabled_region_inside_an_enabled_one(self, device, op):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert check(op, device, torch.bfloat16, enabled=False).output.dtype is torch.float32

    @ops
    def test_double_precision_is_left_alone(self, device, op):
        """As in eager, whatever that does with float64 on this device."""
        check(op, device, torch.bfloat16, torch.float64, torch.float64)

    @ops
    def test_frozen_parameters(self, device, op):
        names = [n for n in parameters(op, torch.float32, device) if n.endswith("_weight")]
        ours = check(op, device, torch.bfloat16, frozen=names)
        assert all(ours.gradients[name] is None for name in names)

    @ops
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointing(self, device, op, use_reentrant):
        def wrap(function, *tensors):
            return checkpoint(function, *tensors, use_reentrant=use_reentrant)

        check(op, device, torch.bfloat16, wrap=wrap)

    @ops
    def test_backward_inside_the_region(self, device, op):
        """Backward under autocast gives the gradients of backward outside of it."""
        torch.manual_seed(1)
        leaves = {"x": torch.randn(ROWS, SMALL[op][0], device=device)} | parameters(op, torch.float32, device)
        gy = torch.randn(ROWS, SMALL[op][-1], device=device)
        outside = outcome(op, OPERATIONS[op].fused, leaves, gy, torch.bfloat16)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            inside = outcome(op, OPERATIONS[op].fused, leaves, gy, torch.bfloat16)
        for name, gradient in outside.gradients.items():
            assert gradient.dtype is inside.gradients[name].dtype
            torch.testing.assert_close(inside.gradients[name], gradient, rtol=2e-2, atol=2e-2)

    @ops
    def test_no_rows(self, device, op):
        leaves = {"x": torch.randn(0, SMALL[op][0], device=device)} | parameters(op, torch.float32, device)
        gy = torch.randn(0, SMALL[op][-1], device=device)
        ours = outcome(op, OPERATIONS[op].fused, leaves, gy, torch.bfloat16)
        assert ours.output.dtype is torch.bfloat16
        assert all(not g.any() for g in ours.gradients.values())
