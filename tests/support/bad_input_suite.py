"""Wrong calls of the operations: the exception type of eager, the given and the allowed in the message."""

from __future__ import annotations

import pytest
import torch

import fusedmlp.functional as fused

from .autograd_suite import leaves_of
from .fault_suite import SMALL, activation_of
from .operations import OPERATIONS

ops = pytest.mark.parametrize("op", list(OPERATIONS))
LAST = {"linear_act": "fc", "glu_mlp": "down", "mlp": "fc2", "relu_mlp": "layer2"}
FIRST = {"linear_act": "fc", "glu_mlp": "gate", "mlp": "fc1", "relu_mlp": "layer0"}


def refused(op: str, tensors, *words, kind=RuntimeError) -> str:
    """The call must raise exactly what eager raises for the same tensors, and say all the words."""
    with pytest.raises(kind) as eager:
        OPERATIONS[op].plain(tensors, activation_of(op))
    with pytest.raises(kind) as ours:
        OPERATIONS[op].fused(tensors, activation_of(op))
    assert type(ours.value) is type(eager.value), f"eager raises {type(eager.value)}, ours {type(ours.value)}"
    message = str(ours.value)
    for word in words:
        assert str(word) in message, f"{word!r} is not in: {message}"
    return message


class BadInputSuite:
    @ops
    @pytest.mark.parametrize("rows", [4, 0])
    def test_wrong_last_dimension(self, device, op, rows):
        tensors = leaves_of(op, torch.float32, device)
        tensors["x"] = torch.randn(rows, 95, device=device)
        refused(op, tensors, "95", "96", f"[{rows}, 95]")

    @ops
    @pytest.mark.parametrize("which", ["first", "last"])
    def test_mixed_devices(self, device, op, which):
        tensors = leaves_of(op, torch.float32, device)
        name = f"{(FIRST if which == 'first' else LAST)[op]}_weight"
        other = "cpu" if device.type == "cuda" else "meta"
        tensors[name] = tensors[name].to(other)
        with pytest.raises(RuntimeError) as ours:
            OPERATIONS[op].fused(tensors, activation_of(op))
        assert other in str(ours.value) and device.type in str(ours.value)

    @ops
    @pytest.mark.parametrize("which", ["x", "weight", "bias"])
    def test_mixed_dtypes(self, device, op, which):
        tensors = leaves_of(op, torch.float32, device)
        name = "x" if which == "x" else f"{LAST[op]}_{which}"
        tensors[name] = tensors[name].to(torch.bfloat16)
        message = refused(op, tensors, "float32", "bfloat16")
        assert "autocast" in message or ".to(" in message, f"no advice in: {message}"

    @ops
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
    def test_integer_and_complex_input(self, device, op, dtype):
        tensors = leaves_of(op, torch.float32, device)
        tensors["x"] = torch.ones(4, SMALL[op][0], device=device).to(dtype)
        refused(op, tensors, str(dtype))

    @ops
    @pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
    def test_no_operand_is_real(self, device, op, dtype):
        """Eager can multiply some of these; a fused operation is for real numbers and says so."""
        tensors = {name: t.to(dtype) for name, t in leaves_of(op, torch.float32, device).items()}
        with pytest.raises(RuntimeError, match=str(dtype)):
            OPERATIONS[op].fused(tensors, activation_of(op))

    @ops
    @pytest.mark.parametrize("shape", [(160,), (2, 160, 96), ()], ids=str)
    def test_weight_of_another_rank(self, device, op, shape):
        tensors = leaves_of(op, torch.float32, device)
        tensors[f"{FIRST[op]}_weight"] = torch.randn(shape, device=device)
        with pytest.raises(RuntimeError) as ours:
            OPERATIONS[op].fused(tensors, activation_of(op))
        assert str(list(shape)) in str(ours.value)

    @ops
    @pytest.mark.parametrize("change", [1, -1])
    def test_bias_of_another_length(self, device, op, change):
        tensors = leaves_of(op, torch.float32, device)
        name = f"{LAST[op]}_bias"
        length = tensors[name].shape[0]
        tensors[name] = torch.randn(length + change, device=device)
        refused(op, tensors, length + change, length)

    @ops
    def test_bias_that_would_broadcast(self, device, op):
        """A bias of one element or of two dimensions is no bias of this layer."""
        for shape in ((1,), (SMALL[op][-1], 1), (1, SMALL[op][-1])):
            tensors = leaves_of(op, torch.float32, device)
            tensors[f"{LAST[op]}_bias"] = torch.randn(shape, device=device)
            with pytest.raises(RuntimeError, match=str(SMALL[op][-1])):
                OPERATIONS[op].fused(tensors, activation_of(op))

    @pytest.mark.parametrize("op", ["glu_mlp", "mlp", "relu_mlp"])
    def test_hidden_sizes_that_do_not_chain(self, device, op):
        tensors = leaves_of(op, torch.float32, device)
        name = f"{LAST[op]}_weight"
        rows, columns = tensors[name].shape
        tensors[name] = torch.randn(rows, columns + 1, device=device)
        refused(op, tensors, columns, columns + 1)

    def test_gate_and_up_of_different_sizes(self, device):
        tensors = leaves_of("glu_mlp", torch.float32, device)
        tensors["up_weight"] = torch.randn(159, 96, device=device)
        tensors["up_bias"] = torch.randn(159, device=device)
        refused("glu_mlp", tensors, 159, 160)

    @pytest.mark.parametrize("op", ["linear_act", "glu_mlp", "mlp"])
    def test_unknown_activation(self, device, op):
        tensors = leaves_of(op, torch.float32, device)
        with pytest.raises(ValueError, match="'tanhh'") as ours:
            OPERATIONS[op].fused(tensors, "tanhh")
        assert all(name in str(ours.value) for name in ("gelu_tanh", "silu", "gelu_new"))

    def test_layers_and_biases_that_do_not_pair(self, device):
        weight = torch.randn(4, 4, device=device)
        with pytest.raises(ValueError, match="1 weights and 2 biases"):
            fused.relu_mlp(torch.randn(2, 4, device=device), [weight], [None, None])
        with pytest.raises(ValueError, match="0 weights"):
            fused.relu_mlp(torch.randn(2, 4, device=device), [], [])

    @ops
    def test_scalar_input(self, device, op):
        tensors = leaves_of(op, torch.float32, device)
        tensors["x"] = torch.tensor(1.0, device=device)
        with pytest.raises(RuntimeError, match="scalar|dimension"):
            OPERATIONS[op].fused(tensors, activation_of(op))

    @ops
    def test_a_refused_call_leaves_no_trace(self, device, op):
        """The next right call is as right as before."""
        tensors = leaves_of(op, torch.float32, device)
        first = OPERATIONS[op].fused(tensors, activation_of(op))
        with pytest.raises(RuntimeError):
            OPERATIONS[op].fused(tensors | {"x": torch.randn(3, 95, device=device)}, activation_of(op))
        assert torch.equal(first, OPERATIONS[op].fused(tensors, activation_of(op)))
