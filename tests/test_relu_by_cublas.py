"""A layer with bias and ReLU, which cuBLAS has in an epilogue: where that serves, as on an H200, on meta tensors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.aot import DEVICES, pretended
from support.gluon import needs_gluon

from fusedmlp import explain_plan, functional, settings
from fusedmlp.settings import Settings, calculate_settings
from fusedmlp.settings.device import DeviceInfo
from fusedmlp.tune.candidates import CANDIDATES

M, D, H = 256, 1024, 4096


def operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(
    activation: str = "relu",
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "nvidia-h200",
    op: str = "mlp",
    width: int = D,
    **forced: str,
) -> tuple[list[str], int, str]:
    """Our kernels, how often cuBLAS' epilogue was called, and what explain_plan says."""
    x, fc1, fc2 = (operand(*shape, dtype=dtype) for shape in ((M, width), (H, width), (width, H)))
    b = operand(H, dtype=dtype) if bias else None
    call = {
        "mlp": lambda: functional.mlp(x, fc1, fc2, b, None, activation),
        "linear_act": lambda: functional.linear_act(x, fc1, b, activation),
        "relu_mlp": lambda: functional.relu_mlp(x, [fc1, fc2], [b, None]),
    }[op]
    epilogue = mock.patch.object(torch, "_addmm_activation", wraps=torch._addmm_activation)
    with pretended(DEVICES[device]) as recorded, settings.override("linear_act", **(forced or {"family": "pair"})):
        with settings.override("down", family="pair"), epilogue as called:
            text = str(explain_plan(call))
    return [entry.name for entry in recorded], called.call_count, text


@pytest.mark.parametrize("op", ["mlp", "linear_act", "relu_mlp"])
def test_it_is_one_launch(op):
    ours, called, text = launches(op=op)
    # Of the two layers of a stack the second has no bias: cuBLAS and the activation's own kernel.
    assert (ours, called) == (["act_forward"] if op == "relu_mlp" else [], 1)
    assert "forward  1. cuBLAS" in text and "bias and" in text.partition("\n  forward  2.")[0]


@pytest.mark.parametrize(
    "other",
    [
        {"bias": False},
        {"activation": "gelu_tanh"},
        {"dtype": torch.float32},
        {"device": "nvidia-a100"},
        {"device": "nvidia-b200"},
        {"width": D + 1},
    ],
    ids=str,
)
def test_elsewhere_the_activation_has_a_kernel(other):
    """Other epilogues were not seen to keep NaN."""
    ours, called, _ = launches(**other)
    assert (ours, called) == (["act_forward"], 0)


def test_a_kernel_that_is_forced_serves():
    ours, called, _ = launches(family="tma")
    assert (ours, called) == (["linear_act_tma"], 0)


def test_a_layer_alone_stays_ours():
    """Eager's two launches would be what the pair of other activations is."""
    x, weight, bias = operand(M, D), operand(H, D), operand(H)
    row = Settings("pair")
    with pretended(DEVICES["nvidia-h200"]), mock.patch.object(settings, "calculate_settings", return_value=row):
        (note,) = explain_plan(functional.linear_act, x, weight, bias, "relu").notes
        (other,) = explain_plan(functional.linear_act, x, weight, bias, "silu").notes
    assert (note.path, other.path) == ("fused", "eager")


@needs_gluon
def test_without_a_table():
    hopper = DeviceInfo("nvidia-unknown", (9, 0), 132)

    def family(tokens: int, op: str = "linear_relu", N: int = H, K: int = D) -> str:
        with mock.patch.object(settings.device, "info", return_value=hopper):
            return calculate_settings(op, tokens, N, K, torch.bfloat16, "cuda").family

    assert [family(tokens) for tokens in (16, 32, 128, 1024)] == ["small", "small", "pair", "pair"]
    assert family(2048) == family(2048, "linear_act") == "gluon"
    assert family(128, N=1536, K=384) == family(128, "linear_act", 1536, 384) == "tma"


def test_it_is_measured_with_the_candidates_of_other_activations():
    assert CANDIDATES["linear_relu"] == CANDIDATES["linear_act"]
