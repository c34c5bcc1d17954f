"""The layers against their eager twins on the CPU, where the path is plain PyTorch: bit for bit."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from io import BytesIO

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fusedmlp
from fusedmlp.activations import ACTIVATIONS

D, H, OUT = 12, 20, 7


class EagerMLP(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], bias: tuple[bool, bool], out: int = D) -> None:
        super().__init__()
        self.act = act
        self.fc1 = nn.Linear(D, H, bias=bias[0])
        self.fc2 = nn.Linear(H, out, bias=bias[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class EagerGLU(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], bias: tuple[bool, bool, bool], out: int = D) -> None:
        super().__init__()
        self.act = act
        self.gate_proj = nn.Linear(D, H, bias=bias[0])
        self.up_proj = nn.Linear(D, H, bias=bias[1])
        self.down_proj = nn.Linear(H, out, bias=bias[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class EagerAct(nn.Linear):
    """Names and initialisation of a Linear, activated."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def eager_act(act: Callable[[Tensor], Tensor], bias: bool) -> EagerAct:
    made = EagerAct(D, OUT, bias=bias)
    made.act = act
    return made


def eager_stack(sizes: list[int], bias: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in zip(sizes, sizes[1:]):
        layers += [nn.Linear(i, o, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


Maker = Callable[[], nn.Module]
PAIRS: dict[str, tuple[Maker, Maker]] = {
    "linear_relu": (lambda: fusedmlp.FusedLinearReLU(D, OUT), lambda: eager_act(F.relu, True)),
    "linear_relu_nobias": (
        lambda: fusedmlp.FusedLinearReLU(D, OUT, bias=False),
        lambda: eager_act(F.relu, False),
    ),
    "linear_gelu": (
        lambda: fusedmlp.FusedLinearAct(D, OUT, activation="gelu"),
        lambda: eager_act(F.gelu, True),
    ),
    "mlp": (lambda: fusedmlp.FusedMLP(D, H), lambda: EagerMLP(F.gelu, (True, True))),
    "mlp_nobias": (
        lambda: fusedmlp.FusedMLP(D, H, OUT, activation="silu", bias=False),
        lambda: EagerMLP(F.silu, (False, False), OUT),
    ),
    "mlp_mixed_recompute": (
        lambda: fusedmlp.FusedMLP(D, H, bias=(False, True), activation="relu", recompute=True),
        lambda: EagerMLP(F.relu, (False, True)),
    ),
    "stack": (lambda: fusedmlp.FusedReLUMLP([D, H, H, OUT]), lambda: eager_stack([D, H, H, OUT], True)),
    "stack_nobias": (
        lambda: fusedmlp.FusedReLUMLP((D, OUT), bias=False),
        lambda: eager_stack([D, OUT], False),
    ),
    "glu": (lambda: fusedmlp.FusedGLUMLP(D, H), lambda: EagerGLU(F.silu, (False, False, False))),
    "glu_mixed": (
        lambda: fusedmlp.FusedGLUMLP(D, H, "sigmoid", bias=(True, False, True), out_features=OUT),
        lambda: EagerGLU(torch.sigmoid, (True, False, True), OUT),
    ),
    "geglu_tanh": (lambda: fusedmlp.FusedGeGLUMLP(D, H), lambda: EagerGLU(gelu_tanh, (False,) * 3)),
    "geglu_erf_bias": (
        lambda: fusedmlp.FusedGeGLUMLP(D, H, bias=True, approximate="none", recompute=True),
        lambda: EagerGLU(F.gelu, (True,) * 3),
    ),
    "geglu_keep": (
        lambda: fusedmlp.FusedGeGLUMLP(D, H, bias=True, keep_activation=True),
        lambda: EagerGLU(gelu_tanh, (True,) * 3),
    ),
    "swiglu": (lambda: fusedmlp.FusedSwiGLUMLP(D, H, bias=True), lambda: EagerGLU(F.silu, (True,) * 3)),
}
each_pair = pytest.mark.parametrize("name", list(PAIRS))


def twins(name: str) -> tuple[nn.Module, nn.Module]:
    """A fused and an eager module, each made from the same seed."""
    make_fused, make_eager = PAIRS[name]
    torch.manual_seed(3)
    fused = make_fused()
    torch.manual_seed(3)
    return fused, make_eager()


def step(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of x, gradients of the parameters, of a sum of squares."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_same_step(fused: nn.Module, eager: nn.Module, x: Tensor) -> None:
    ours, theirs = step(fused, x), step(eager, x)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    for key, gradient in ours[2].items():
        assert torch.equal(gradient, theirs[2][key]), key


@each_pair
def test_same_names_order_and_initial_values(name: str) -> None:
    fused, eager = twins(name)
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in eager.named_parameters()]
    for (key, ours), theirs in zip(fused.named_parameters(), eager.parameters()):
        assert torch.equal(ours, theirs), key
    torch.manual_seed(3)
    PAIRS[name][0]()
    after_ours = torch.rand(4)
    torch.manual_seed(3)
    PAIRS[name][1]()
    assert torch.equal(after_ours, torch.rand(4)), "the constructor consumes as many random numbers as eager"


@each_pair
@pytest.mark.parametrize("shape", [(D,), (5, D), (0, D), (2, 3, 4, D)], ids=str)
def test_output_and_gradients_equal_eager(name: str, shape: tuple[int, ...]) -> None:
    fused, eager = twins(name)
    assert_same_step(fused, eager, torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@each_pair
def test_other_dtypes_equal_eager(name: str, dtype: torch.dtype) -> None:
    fused, eager = twins(name)
    assert_same_step(fused.to(dtype), eager.to(dtype), torch.randn(5, D, dtype=dtype))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_by_every_name(activation: str) -> None:
    known = ACTIVATIONS[activation]
    x = torch.randn(5, D)
    for alias in (known.name, *known.hf_names):
        layer = fusedmlp.FusedLinearAct(D, OUT, activation=alias)
        assert layer.activation == activation
        assert torch.equal(layer(x), known.fn(F.linear(x, layer.weight, layer.bias)))
        for made in (fusedmlp.FusedMLP(D, H, activation=alias), fusedmlp.FusedGLUMLP(D, H, activation=alias)):
            assert made.activation == activation
            eager = EagerMLP(known.fn, (True, True)) if hasattr(made, "fc1") else EagerGLU(known.fn, (False,) * 3)
            eager.load_state_dict(made.state_dict())
            assert torch.equal(made(x), eager(x))


@each_pair
def test_biases_far_from_zero_are_used_once(name: str) -> None:
    fused, eager = twins(name)
    for module in (fused, eager):
        values = iter((3.0, -5.0, 7.0))
        for key, parameter in module.named_parameters():
            nn.init.constant_(parameter, next(values)) if key.endswith("bias") else parameter.data.mul_(0.1)
    assert_same_step(fused, eager, torch.randn(9, D))


@each_pair
def test_strict_loading_both_ways(name: str) -> None:
    fused, eager = twins(name)
    other = PAIRS[name][1]()
    fused.load_state_dict(other.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(fused.state_dict().values(), other.state_dict().values()))
    eager.load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(3, D)
    assert torch.equal(eager(x), fused(x)) and torch.equal(other(x), fused(x))


@each_pair
def test_moves_and_loads_without_a_copy(name: str) -> None:
    fused, eager = twins(name)
    x = torch.randn(3, D, dtype=torch.bfloat16)
    assert torch.equal(fused.half().to(torch.bfloat16)(x), eager.half().to(torch.bfloat16)(x))
    empty = fused.to("meta").to_empty(device="cpu")
    empty.load_state_dict(eager.state_dict())
    assert torch.equal(empty(x), eager(x))
    assigned = copy.deepcopy(fused).to("meta")
    assigned.load_state_dict(eager.state_dict(), assign=True)
    assert torch.equal(assigned(x), eager(x))
    held = eager.state_dict()
    assert all(v.data_ptr() == held[k].data_ptr() for k, v in assigned.state_dict().items())
    with torch.device("meta"):
        skeleton = PAIRS[name][0]()
    assert all(p.is_meta for p in skeleton.parameters())
    skeleton.load_state_dict(eager.state_dict(), assign=True)
    assert torch.equal(skeleton(x), eager(x))


@each_pair
def test_copies_are_independent(name: str) -> None:
    fused, _ = twins(name)
    x = torch.randn(3, D)
    before = fused(x)  # whatever a first forward caches exists from here on
    clones = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), AveragedModel(fused).module]
    for clone in clones:
        assert repr(clone) == repr(fused)
        assert torch.equal(clone(x), before)
        optimizer = torch.optim.SGD(clone.parameters(), lr=0.5)
        clone(x).square().sum().backward()
        optimizer.step()
        assert not torch.equal(clone(x), before)
    assert torch.equal(fused(x), before)
    buffer = BytesIO()
    torch.save(fused.state_dict(), buffer)
    buffer.seek(0)
    clones[0].load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(clones[0](x), before)


@each_pair
def test_parameters_are_the_same_objects_after_a_forward(name: str) -> None:
    fused, _ = twins(name)
    before = list(fused.parameters())
    optimizer = torch.optim.SGD(before, lr=0.5)
    x = torch.randn(3, D)
    first = fused(x)
    first.square().sum().backward()
    optimizer.step()
    assert all(a is b for a, b in zip(before, fused.parameters()))
    assert not torch.equal(fused(x), first)


@each_pair
def test_functional_call_uses_the_given_tensors(name: str) -> None:
    fused, eager = twins(name)
    given = {k: torch.randn_like(v) for k, v in fused.state_dict().items()}
    x = torch.randn(3, D)
    ours = torch.func.functional_call(fused, given, (x,))
    assert torch.equal(ours, torch.func.functional_call(eager, given, (x,)))
    assert not torch.equal(ours, fused(x))


@each_pair
def test_frozen_parameters_get_no_gradient(name: str) -> None:
    fused, eager = twins(name)
    for module in (fused, eager):
        for index, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(index % 2 == 1)
    assert_same_step(fused, eager, torch.randn(5, D))


def test_reset_parameters_draws_as_linear_does() -> None:
    layer, linear = fusedmlp.FusedLinearAct(D, OUT), nn.Linear(D, OUT)
    torch.manual_seed(8)
    layer.reset_parameters()
    torch.manual_seed(8)
    linear.reset_parameters()
    assert torch.equal(layer.weight, linear.weight) and torch.equal(layer.bias, linear.bias)


def test_linear_act_is_no_linear_and_the_children_are() -> None:
    assert not isinstance(fusedmlp.FusedLinearAct(D, OUT), nn.Linear)
    assert {type(c) for c in fusedmlp.FusedGLUMLP(D, H).children()} == {nn.Linear}
    assert {type(c) for c in fusedmlp.FusedMLP(D, H).children()} == {nn.Linear}
    assert {type(c) for c in fusedmlp.FusedReLUMLP([D, H, OUT]).children()} == {nn.Linear}


def test_repr_says_what_the_layer_is() -> None:
    assert "activation=gelu" in repr(fusedmlp.FusedMLP(D, H, activation="gelu"))
    assert "recompute=True, keep_activation=False" in repr(fusedmlp.FusedGLUMLP(D, H, recompute=True))
    assert "recompute=False, keep_activation=True" in repr(fusedmlp.FusedSwiGLUMLP(D, H, keep_activation=True))
    expected = f"in_features={D}, out_features={OUT}, bias=False, activation=relu"
    assert expected in repr(fusedmlp.FusedLinearReLU(D, OUT, bias=False))
    assert fusedmlp.FusedGeGLUMLP(D, H, approximate="none").approximate == "none"


def test_recompute_and_keep_activation_together_are_refused() -> None:
    both = {"recompute": True, "keep_activation": True}
    weights = torch.randn(H, D), torch.randn(H, D), torch.randn(D, H)
    layer = fusedmlp.FusedGLUMLP(D, H, recompute=True)
    layer.keep_activation = True
    calls: list[Callable[[], object]] = [
        lambda: fusedmlp.FusedGLUMLP(D, H, **both),
        lambda: fusedmlp.FusedGeGLUMLP(D, H, **both),
        lambda: fusedmlp.FusedSwiGLUMLP(D, H, **both),
        lambda: fusedmlp.patch(EagerMLP(F.silu, (False, False)), **both),
        lambda: fusedmlp.glu_mlp(torch.randn(3, D), *weights, **both),
        lambda: layer(torch.randn(3, D)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="recompute=True and keep_activation=True contradict each other"):
            call()


@each_pair
def test_compiles_without_a_graph_break(name: str) -> None:
    fused, eager = twins(name)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for module in (compiled, eager):
        module.zero_grad()
    x = torch.randn(5, D)
    y = compiled(x)
    y.square().sum().backward()
    expected = step(eager, x)
    torch.testing.assert_close(y.detach(), expected[0])
    for key, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[2][key])


def test_import_and_construction_without_a_gpu() -> None:
    program = """
        import inspect, sys
        import torch
        import fusedmlp as f
        makes = [
            lambda d: f.FusedLinearReLU(6, 9, device=d),
            lambda d: f.FusedMLP(6, 9, device=d),
            lambda d: f.FusedReLUMLP([6, 9, 4], device=d),
            lambda d: f.FusedGeGLUMLP(6, 9, device=d),
            lambda d: f.FusedSwiGLUMLP(6, 9, device=d),
        ]
        for make in makes:
            for device in ("cpu", "meta"):
                layer = make(device)
                assert layer.state_dict() and repr(layer)
                assert list(inspect.signature(layer.forward).parameters) == ["x"]
        assert "triton.backends.nvidia.driver" not in sys.modules
        for make in makes:
            assert make("cpu")(torch.randn(2, 6)).isfinite().all()
        assert not torch.cuda.is_initialized()
        print("fine")
    """
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "fine"


def test_forward_takes_one_argument() -> None:
    for make_fused, _ in PAIRS.values():
        assert list(inspect.signature(make_fused().forward).parameters) == ["x"]
