"""fusedmlp.warmup on a GPU: the suite, and no kernel is loaded afterwards."""

from __future__ import annotations

import pytest
import torch
from support.loads import loads
from support.warmup_suite import WarmupSuite
from torch import nn

import fusedmlp
from fusedmlp import counters

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.usefixtures("lone_layers_fused")
class TestWarmup(WarmupSuite):
    pass


def model(dtype: torch.dtype) -> nn.Sequential:
    layers = (
        fusedmlp.FusedGeGLUMLP(256, 512, bias=True),
        fusedmlp.FusedSwiGLUMLP(256, 512),
        fusedmlp.FusedMLP(256, 512),
        fusedmlp.FusedLinearReLU(256, 256),
        fusedmlp.FusedReLUMLP([256, 256, 256]),
    )
    return nn.Sequential(*layers).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_call_loads_a_kernel_afterwards(dtype: torch.dtype) -> None:
    """Nor does one whose tokens come in several dimensions, which has a plan of its own."""
    module = model(dtype)
    sizes = (1, 16, 40, 513, 1024)
    fusedmlp.warmup(module, sizes)
    with loads() as found:
        for tokens in sizes:
            for lead in ((tokens,), (1, tokens)):
                x = torch.randn(*lead, 256, device="cuda", dtype=dtype)
                with torch.no_grad():
                    module(x)
                module(x.requires_grad_()).float().square().sum().backward()
                assert found == [], lead
    torch.cuda.synchronize()


def test_every_device_that_the_module_lies_on() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    layer = fusedmlp.FusedReLUMLP([64, 64, 64], device=last, dtype=torch.bfloat16)
    fusedmlp.warmup(layer, 32)
    left = counters._for_graphs[last.index]
    assert left.device == last and left.numel() >= counters.GRAPH_COUNTERS // 4
    x = torch.randn(32, 64, device=last, dtype=torch.bfloat16)
    with loads() as found, torch.no_grad():
        layer(x)
    assert found == []
