"""torch.compile on a GPU: the suite, and every mode that users choose."""

import pytest
import torch
from support.autograd_suite import leaves_of
from support.compile_suite import Block, CompileSuite, assert_same, functional
from support.operations import OPERATIONS
from torch import nn

import fusedmlp

pytestmark = pytest.mark.gpu
CALLS = [*((op, {}) for op in OPERATIONS), ("glu_mlp", {"keep_activation": True})]
MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.usefixtures("lone_layers_fused")
class TestCompile(CompileSuite):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op, options", CALLS, ids=str)
def test_operations_under_inductor(device, op, options, mode):
    torch._dynamo.reset()
    plain = functional(op, **options)
    compiled = torch.compile(plain, fullgraph=True, mode=mode)
    for _ in range(3):  # with CUDA graphs: warm-up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(op, compiled, plain, leaves_of(op, torch.float32, device))


@pytest.mark.parametrize("mode", MODES)
def test_transformer_blocks_under_inductor(device, mode):
    torch._dynamo.reset()
    model = nn.Sequential(*[Block() for _ in range(4)]).to(device)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        CompileSuite().check_module(model, compiled, torch.randn(2, 9, 96, device=device))


@pytest.mark.parametrize("mode", MODES)
def test_inference_under_inductor(device, mode):
    torch._dynamo.reset()
    module = fusedmlp.FusedGeGLUMLP(96, 160).to(device).eval()
    compiled = torch.compile(module, fullgraph=True, mode=mode)
    for _ in range(3):
        x = torch.randn(65, 96, device=device)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
