"""Guesses for our layers come from their plans: here on the CPU, where the interpreter runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.interpreter import repair
from torch import nn

from fusedmlp import FusedGLUMLP, FusedMLP, FusedReLUMLP, operations
from fusedmlp.profiling import count_launches
from fusedmlp.profiling.assertions import training_step
from fusedmlp.profiling.guess import guess_fused
from fusedmlp.profiling.workloads import mlp

repair()
pytestmark = pytest.mark.filterwarnings("ignore::fusedmlp.profiling.HostCountWarning")
LAYERS = {"geglu": FusedGLUMLP, "swiglu": FusedGLUMLP, "relu": FusedMLP, "naive": FusedReLUMLP}


@pytest.mark.parametrize("kind, forward, step", [("geglu", 2, 6), ("swiglu", 2, 6), ("relu", 2, 6), ("naive", 1, 8)])
def test_launches_of_the_plan(kind: str, forward: int, step: int) -> None:
    layer: Any = LAYERS[kind].from_module(mlp(kind, 32, 64))
    x = torch.randn(16, 32, requires_grad=True)
    before = dict(operations.OPERATIONS)
    with torch.no_grad():
        found = guess_fused(lambda: layer(x))
    assert found.kernels == forward, found.parts
    found = guess_fused(training_step(layer, x))
    assert found.kernels == step, found.parts
    assert before == operations.OPERATIONS


def test_what_is_around_the_layer_counts_too() -> None:
    layer: Any = FusedGLUMLP.from_module(mlp("geglu", 32, 64))
    model = nn.Sequential(nn.LayerNorm(32), layer, nn.Linear(32, 8))
    x = torch.randn(16, 32)
    with torch.no_grad():
        found = guess_fused(lambda: model(x))
        seen = count_launches(lambda: model(x))
    assert found.kernels == 4
    assert found.parts[0].startswith("aten.native_layer_norm") and found.parts[-1].startswith("aten.addmm")
    assert seen.kernels == 4, seen  # the kernel of gate and up, and the products that PyTorch dispatches


def test_an_error_leaves_the_operations_as_they_were() -> None:
    before = dict(operations.OPERATIONS)

    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        guess_fused(broken)
    assert before == operations.OPERATIONS
