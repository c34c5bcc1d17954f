"""Children that are not plain Linears (adapters, hooks, parametrisations, ...) are called, not read."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusedmlp
from fusedmlp import explain

D, H = 12, 20


class LoraLinear(nn.Module):
    """A frozen Linear with a low-rank addition, as adapter libraries put it in a Linear's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, base.in_features, generator=torch.Generator().manual_seed(1)))
        self.lora_b = nn.Parameter(torch.randn(base.out_features, 2, generator=torch.Generator().manual_seed(2)))
        self.weight = base.weight  # adapters expose the base weight under the usual name

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class Int8Linear(nn.Module):
    """A quantised Linear: its weight is packed and of another shape."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = base.weight.detach().abs().max() / 127
        codes = (base.weight.detach() / self.scale).round().to(torch.int8)
        self.shape = base.weight.shape
        self.register_buffer("weight", codes.view(torch.uint8).flatten())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.view(torch.int8).view(self.shape) * self.scale)


class LoudLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class TaggedTensor(Tensor):
    """A tensor subclass, as sharding and quantisation libraries use for weights."""


def use_lora(module: nn.Module, name: str) -> None:
    setattr(module, name, LoraLinear(getattr(module, name)))


def use_int8(module: nn.Module, name: str) -> None:
    setattr(module, name, Int8Linear(getattr(module, name)))


def use_subclass(module: nn.Module, name: str) -> None:
    getattr(module, name).__class__ = LoudLinear


def use_forward_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_forward_hook(lambda m, args, out: out * 2)


def use_pre_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_forward_pre_hook(lambda m, args: (args[0] * 2,))


def use_backward_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_full_backward_hook(lambda m, gx, gy: (gx[0] * 2,))


def use_backward_pre_hook(module: nn.Module, name: str) -> None:
    getattr(module, name).register_full_backward_pre_hook(lambda m, gy: (gy[0] * 3,))


def use_weight_norm(module: nn.Module, name: str) -> None:
    parametrizations.weight_norm(getattr(module, name))


def use_pruning(module: nn.Module, name: str) -> None:
    prune.l1_unstructured(getattr(module, name), "weight", amount=0.5)


def use_own_forward(module: nn.Module, name: str) -> None:
    child = getattr(module, name)
    child.forward = lambda x: F.linear(x, child.weight) * 3


def use_tensor_subclass(module: nn.Module, name: str) -> None:
    child = getattr(module, name)
    child.weight = nn.Parameter(child.weight.detach().as_subclass(TaggedTensor))


WRAPPERS: dict[str, tuple[Callable[[nn.Module, str], None], str]] = {
    "lora": (use_lora, "LoraLinear"),
    "int8": (use_int8, "Int8Linear"),
    "subclass": (use_subclass, "LoudLinear"),
    "forward_hook": (use_forward_hook, "forward hook"),
    "pre_hook": (use_pre_hook, "forward pre-hook"),
    "backward_hook": (use_backward_hook, "backward hook"),
    "backward_pre_hook": (use_backward_pre_hook, "backward pre-hook"),
    "weight_norm": (use_weight_norm, "ParametrizedLinear"),
    "pruning": (use_pruning, "forward pre-hook"),
    "own_forward": (use_own_forward, "forward replaced"),
    "tensor_subclass": (use_tensor_subclass, "TaggedTensor"),
}


class EagerGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.down_proj = nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class EagerMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[str, ...]]] = {
    "glu_mlp": (lambda: fusedmlp.FusedGeGLUMLP(D, H), EagerGLU, ("gate_proj", "up_proj", "down_proj")),
    "mlp": (lambda: fusedmlp.FusedMLP(D, H), EagerMLP, ("fc1", "fc2")),
    "relu_mlp": (
        lambda: fusedmlp.FusedReLUMLP([D, H, D]),
        lambda: nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D), nn.ReLU()),
        ("0", "2"),
    ),
}
PLACES = [(op, child) for op, (_, _, children) in LAYERS.items() for child in children]


def gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y, x.grad, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_equal_to_eager(fused: nn.Module, eager: nn.Module, x: Tensor) -> None:
    ours, theirs = gradients(fused, x), gradients(eager, x)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    assert all(torch.equal(g, theirs[2][n]) for n, g in ours[2].items())


@pytest.mark.parametrize("op, child", PLACES, ids=str)
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_wrapped_child_counts_as_in_eager(op: str, child: str, wrapper: str) -> None:
    wrap, told = WRAPPERS[wrapper]
    make_fused, make_eager, _ = LAYERS[op]
    fused, eager = make_fused(), make_eager()
    eager.load_state_dict(fused.state_dict())
    x = torch.randn(5, D)
    before = gradients(copy.deepcopy(fused), x)
    for module in (fused, eager):
        wrap(module, child)
    assert_equal_to_eager(fused, eager, x)
    if wrapper != "tensor_subclass" and wrapper != "weight_norm":
        after = gradients(fused, x)
        assert not (torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])), "the wrapper does something"
    with explain.recording() as notes:
        fused(x)
    note = next(n for n in notes if n.path == "eager")
    assert note.op == op
    assert child in note.reason and told in note.reason, note.reason


@pytest.mark.parametrize("op", list(LAYERS))
def test_an_adapter_trains(op: str) -> None:
    make_fused, _, children = LAYERS[op]
    fused = make_fused()
    use_lora(fused, children[0])
    fused(torch.randn(5, D)).square().sum().backward()
    adapter = getattr(fused, children[0])
    assert adapter.lora_a.grad.abs().sum() > 0 and adapter.lora_b.grad.abs().sum() > 0
    assert adapter.base.weight.grad is None


@pytest.mark.parametrize("op", list(LAYERS))
def test_hooks_for_every_module_run_on_the_children(op: str) -> None:
    make_fused, _, children = LAYERS[op]
    fused, seen = make_fused(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    try:
        with explain.recording() as notes:
            fused(torch.randn(5, D))
    finally:
        handle.remove()
    assert all(getattr(fused, name) in seen for name in children)
    assert any("every module" in note.reason for note in notes)


@pytest.mark.parametrize("op", list(LAYERS))
def test_a_removed_wrapper_gives_the_layer_back(op: str) -> None:
    make_fused, _, children = LAYERS[op]
    fused, x = make_fused(), torch.randn(5, D)
    before = fused(x)
    handle = getattr(fused, children[0]).register_forward_hook(lambda m, args, out: out * 2)
    assert not torch.equal(fused(x), before)
    handle.remove()
    assert torch.equal(fused(x), before)


@pytest.mark.parametrize("op", list(LAYERS))
def test_a_replaced_linear_is_used(op: str) -> None:
    make_fused, make_eager, children = LAYERS[op]
    fused, eager = make_fused(), make_eager()
    first = nn.Linear(D, H)
    for module in (fused, eager):
        setattr(module, children[0], first)
    eager.load_state_dict(fused.state_dict())
    x = torch.randn(5, D)
    assert torch.equal(fused(x), eager(x))


@pytest.mark.parametrize("wrapper", ["forward_hook", "weight_norm", "lora"])
def test_wrapped_children_compile_without_a_graph_break(wrapper: str) -> None:
    # Dynamo does not guard on hooks: what another module compiled to would be taken over.
    torch.compiler.reset()
    fused = fusedmlp.FusedGeGLUMLP(D, H)
    WRAPPERS[wrapper][0](fused, "up_proj")
    x = torch.randn(5, D)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), fused(x))


def test_a_parametrised_linear_act_uses_what_the_parametrisation_computes() -> None:
    layer, linear = fusedmlp.FusedLinearReLU(D, H), nn.Linear(D, H)
    linear.load_state_dict(layer.state_dict())

    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    for module in (layer, linear):
        parametrize.register_parametrization(module, "weight", Doubled())
    x = torch.randn(5, D)
    assert torch.equal(layer(x), F.relu(linear(x)))
    layer(x).sum().backward()
    F.relu(linear(x)).sum().backward()
    ours, theirs = layer.parametrizations.weight.original.grad, linear.parametrizations.weight.original.grad
    assert torch.equal(ours, theirs)


def test_a_pruned_linear_act_uses_the_pruned_weight() -> None:
    layer = fusedmlp.FusedLinearReLU(D, H)
    whole = layer.weight.detach().clone()
    prune.l1_unstructured(layer, "weight", amount=0.5)
    x = torch.randn(5, D)
    assert torch.equal(layer(x), F.relu(F.linear(x, whole * layer.weight_mask, layer.bias)))


def test_a_linear_act_with_a_tensor_subclass_takes_the_eager_way() -> None:
    layer = fusedmlp.FusedLinearReLU(D, H)
    x = torch.randn(5, D)
    expected = layer(x)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(TaggedTensor))
    with explain.recording() as notes:
        assert torch.equal(layer(x), expected)
    assert [n.path for n in notes] == ["eager"] and "TaggedTensor" in notes[0].reason
