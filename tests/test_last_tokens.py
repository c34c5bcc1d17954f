"""Weight gradients from which cuBLAS would leave the last tokens out: which those are, and what takes their place."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.aot import DEVICES, pretended
from support.operations import OPERATIONS

from fusedmlp import explain_plan, functional, settings
from fusedmlp.activations import resolve_activation
from fusedmlp.plan import Plan, left_out

BF16 = torch.bfloat16


def plan_of(tokens: int, dtype: torch.dtype = BF16, device: str = "cuda") -> Plan:
    return Plan("linear_act", resolve_activation("relu"), tokens, (256, 512), dtype, torch.device(device), "ieee", True)


# Seen to lack tokens on an H200, over 2 to 16 slices.
@pytest.mark.parametrize("tokens", [2561, 2689, 3842, 5122, 6404, 7685, 8965, 10245, 11526, 12808, 14791, 26632, 29704])
def test_left_out(tokens):
    assert left_out(tokens) and 0 < plan_of(tokens).last_tokens(512, 256) == tokens % 64 < 16


@pytest.mark.parametrize("tokens", [0, 1, 63, 65, 1025, 1984, 2560, 2562, 2625, 2700, 4096, 4160, 8190, 8192, 16383])
def test_whole(tokens):
    assert not left_out(tokens) and plan_of(tokens).last_tokens(512, 256) == 0


def test_multiples_of_a_tile_are_whole():
    """What is computed apart is so that the rest is one."""
    assert not any(map(left_out, range(0, 100_000, 64)))


@pytest.mark.parametrize(
    "plan, N, K",
    [
        (plan_of(2561, torch.float32), 512, 256),
        (plan_of(2561, device="cpu"), 512, 256),
        (plan_of(2561), 2304, 9216),
        (plan_of(2561), 2049, 2048),
    ],
    ids=["fp32", "cpu", "wide", "just wide"],
)
def test_only_where_cublas_splits(plan, N, K):
    assert plan.last_tokens(N, K) == 0


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("tokens", [2561, 2560, 2563], ids=str)
def test_explain_plan_counts_the_products(op, tokens):
    def operand(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=BF16, device="meta", requires_grad=True)

    x, up, down = operand(tokens, 256), operand(512, 256), operand(256, 512)
    call = {
        "linear_act": lambda: functional.linear_act(x, up, None, "silu"),
        "mlp": lambda: functional.mlp(x, up, down, None, None, "silu"),
        "glu_mlp": lambda: functional.glu_mlp(x, up, operand(512, 256), down, activation="silu"),
        "relu_mlp": lambda: functional.relu_mlp(x, [up, down], [None, None]),
    }[op]
    products = []

    def counted(name: str):
        original = getattr(torch, name)

        def product(*args, **options):
            products.append((name, args[-1].shape[0]))
            return original(*args, **options)

        return mock.patch.object(torch, name, product)

    with pretended(DEVICES["nvidia-a100"]), settings.override(family="pointer"):
        notes = explain_plan(call).notes
        y = call()
        with counted("mm"), counted("addmm"):
            y.backward(torch.empty_like(y))
    (note,) = notes
    gradients = [text for text in note.backward if "dW" in text]
    weights = 1 if op == "linear_act" else 2
    apart = weights if tokens == 2561 else 0
    assert sum(text.endswith("of the last 1 tokens") for text in gradients) == products.count(("mm", 1)) == apart
    assert sum(text.endswith("of the others, added") for text in gradients) == products.count(("addmm", 2560)) == apart
    assert len(gradients) == weights + apart
    assert sum(rows == tokens for _, rows in products) == weights - apart
