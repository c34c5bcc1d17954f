"""The stateless layers on a GPU: the adopter's numbers, in as many launches as the layers with weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from support.compare import assert_matches
from torch import Tensor, nn

from fusedmlp import FusedGLUMLP, FusedLinearReLU, FusedMLP, count_launches, explain_plan, layers

pytestmark = pytest.mark.gpu
ACTS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
COMPUTES = {"GeGLUMLP": {"gelu", "gelu_tanh"}, "SwiGLUMLP": {"silu"}, "GLUMLP": set(ACTS) - {"tanh"}}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Gated(nn.Module):
    """A gated MLP as model code writes it."""

    def __init__(self, act: nn.Module, bias: bool, hidden: int = 96, intermediate: int = 160) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class TwoLayer(nn.Module):
    """A two-layer MLP as model code writes it."""

    def __init__(self, hidden: int = 96, intermediate: int = 160) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)
        self.act = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(hidden_states)))


def lend(name: str, module: nn.Module) -> nn.Module:
    """What kernelize() does to a module."""
    module.forward = MethodType(getattr(layers, name).forward, module)  # type: ignore[method-assign]
    return module


def results(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of every parameter."""
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf)
    gy = torch.ones_like(y) * torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [leaf, *module.parameters()], gy)]


def assert_same_numbers(call: Callable[[Tensor], Tensor], eager: Any, ours: nn.Module, x: Tensor) -> None:
    exact = copy.deepcopy(eager).double()
    triples = zip(results(call, ours, x), results(eager, eager, x), results(exact, exact, x.double()))
    for number, (found, wanted, truth) in enumerate(triples):
        assert_matches(f"result {number}", found, wanted, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", COMPUTES)
def test_adopters_keep_their_numbers(name: str, act: str, bias: bool, dtype: torch.dtype):
    eager = Gated(ACTS[act](), bias).to("cuda", dtype)
    ours = lend(name, copy.deepcopy(eager))
    x = torch.randn(300, 96, device="cuda", dtype=dtype)
    assert_same_numbers(ours, eager, ours, x)
    path = explain_plan(ours, x).notes[0]
    if act not in COMPUTES[name]:
        assert torch.equal(ours(x), eager(x))
        assert path.path == "eager"
        assert ("computes" if act == "tanh" else "applies") in path.reason
    elif dtype != torch.float32:
        assert path.path != "eager", path


@pytest.mark.parametrize("act", ["gelu_tanh", "tanh"])
def test_under_inductor(act: str):
    torch._dynamo.reset()
    eager = Gated(ACTS[act](), True).to("cuda")
    ours = lend("GeGLUMLP", copy.deepcopy(eager))
    compiled = torch.compile(ours, fullgraph=True)
    assert_same_numbers(compiled, eager, ours, torch.randn(300, 96, device="cuda"))


COUNTED: dict[str, tuple[str, Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "gated": ("GLUMLP", lambda: Gated(nn.SiLU(), False, 768, 3072), lambda m: FusedGLUMLP.from_module(m)),
    "gated with biases": ("SwiGLUMLP", lambda: Gated(nn.SiLU(), True, 768, 3072), lambda m: FusedGLUMLP.from_module(m)),
    "two layers": ("MLP", lambda: TwoLayer(768, 3072), lambda m: FusedMLP.from_module(m)),
    "linear and relu": (
        "LinearReLU",
        lambda: nn.Sequential(nn.Linear(768, 3072), nn.ReLU()),
        lambda m: FusedLinearReLU.from_module(m),
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_as_many_launches_as_the_layer_with_weights(case: str):
    name, make, fuse = COUNTED[case]
    eager = make().to("cuda", torch.bfloat16)
    fused, ours = fuse(eager), lend(name, copy.copy(eager))
    x = torch.randn(8192, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(fused(x))

    def step(module: nn.Module) -> None:
        torch.autograd.backward(module(x), dy)
        x.grad = None
        eager.zero_grad(set_to_none=True)

    assert count_launches(lambda: ours(x)).names == count_launches(lambda: fused(x)).names
    assert count_launches(lambda: step(ours)).names == count_launches(lambda: step(fused)).names


def test_changes_after_the_first_call_are_seen():
    eager = Gated(nn.SiLU(), False).to("cuda")
    ours = lend("SwiGLUMLP", copy.deepcopy(eager))
    x = torch.randn(300, 96, device="cuda")
    ours(x)
    for module in (ours, eager):
        module.act_fn = nn.ReLU()
    assert torch.equal(ours(x), eager(x))
