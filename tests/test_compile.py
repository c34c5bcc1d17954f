"""torch.compile on CPU tensors; the same suite runs on the kernels in tests/interpreter and tests/gpu."""

import pytest
import torch
from support.autograd_suite import leaves_of
from support.compile_suite import CompileSuite, assert_same, functional

import fusedmlp


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestCompile(CompileSuite):
    pass


@pytest.mark.parametrize("op", ["linear_act", "glu_mlp"])
def test_operation_under_inductor(device, op):
    torch._dynamo.reset()
    compiled = torch.compile(functional(op), fullgraph=True)
    assert_same(op, compiled, functional(op), leaves_of(op, torch.float32, device))


def test_module_under_inductor(device):
    torch._dynamo.reset()
    module = fusedmlp.FusedSwiGLUMLP(96, 160)
    compiled = torch.compile(module, fullgraph=True)
    CompileSuite().check_module(module, compiled, torch.randn(2, 5, 96))
