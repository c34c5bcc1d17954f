"""What the launchers hand to the kernels for small batches: recorded on meta tensors, as on an H200."""

from __future__ import annotations

import pytest
import torch
from support.aot import DEVICES, Recorded, pretended
from torch import Tensor

from fusedmlp import functional, settings

D, H = 768, 3072


def operand(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def recorded(call: str, device: str = "nvidia-h200", tokens: int = 8, **forced) -> list[Recorded]:
    x, gate, up, down = operand(tokens, D), operand(H, D), operand(H, D), operand(D, H)
    with pretended(DEVICES[device]) as launches, settings.override(**{"family": "small"} | forced):
        {
            "glu_mlp": lambda: functional.glu_mlp(x, gate, up, down),
            "mlp": lambda: functional.mlp(x, gate, down),
            "linear_act": lambda: functional.linear_act(x, gate, None, "gelu"),
        }[call]()
    return launches


def starts(launch: Recorded) -> tuple[bool, bool, bool]:
    """Whether it lets the next one start early, waits for the one ahead inside, and is launched so."""
    constants = launch.named_constants
    return constants["TRIGGER"], constants.get("DEPENDENT", False), bool(dict(launch.options).get("launch_pdl"))


@pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
def test_the_last_product_starts_while_the_first_layer_ends(op):
    first, last = recorded(op)
    assert starts(first) == (True, False, False)
    assert starts(last) == (False, True, True)


@pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
def test_no_launch_starts_early_before_9_0(op):
    assert [starts(launch) for launch in recorded(op, "nvidia-a100")] == [(False, False, False)] * 2


def test_a_layer_alone_neither_waits_nor_is_waited_for():
    (launch,) = recorded("linear_act")
    assert launch.name == "linear_small" and starts(launch) == (False, False, False)


def test_nothing_waits_for_the_first_layer_where_cublas_follows():
    x, fc1, fc2 = operand(8, D), operand(H, D), operand(D, H)
    first, last = settings.override("linear_act", family="small"), settings.override("down", family="pair")
    with pretended(DEVICES["nvidia-h200"]) as launches, first, last:
        functional.mlp(x, fc1, fc2)
    assert [starts(launch) for launch in launches] == [(False, False, False)]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("op, keep", [("glu_mlp", False), ("glu_mlp", True), ("mlp", False)])
def test_the_backward(op, keep, biases):
    """One launch to the hidden layer, which sums the biases' gradients, and one for dX."""
    b, b_out = (operand(H), operand(D)) if biases else (None, None)
    x, gate, up, down = operand(8, D), operand(H, D), operand(H, D), operand(D, H)
    with pretended(DEVICES["nvidia-h200"]) as launches, settings.override(family="small"):
        if op == "glu_mlp":
            y = functional.glu_mlp(x, gate, up, down, b, b, b_out, "gelu", keep_activation=keep)
        else:
            y = functional.mlp(x, gate, down, b, b_out, "gelu")
        forward = len(launches)
        y.backward(torch.empty_like(y))
    hidden, *rest = launches[forward:]
    assert hidden.name == "hidden_backward_small"
    names = ("GATED", "STORE_H", "BIAS_GRAD", "OUT_BIAS_GRAD", "SAVES_OUTPUT")
    gated = op == "glu_mlp"
    assert [hidden.named_constants[n] for n in names] == [gated, not keep, biases, biases, False]
    assert hidden.grid == H // 64 + (D // 128 if biases else 0)
    (dx,) = rest
    assert dx.name == "dual_dgrad_small" and ("wu_ptr" in dx.named_constants) is not gated
    splits = dx.named_constants["SPLITS"]
    assert splits > 1 and dx.grid == splits * (D // 64)
