"""The stateless layers, lent to other modules by the real ``kernelize()``: nothing but the speed may change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import Mode
from support.adopters import (
    ACTS,
    ADOPTERS,
    SIZES,
    Functional,
    Gated,
    Helped,
    Limited,
    Scaled,
    Sliced,
    Switching,
    assert_equal_steps,
    fused_op,
    lend,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, ModernBertConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP

import fusedmlp
from fusedmlp import layers
from fusedmlp._modes import modes
from fusedmlp.layers import _COMPUTES

MODES = [Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("adopter", ADOPTERS)
def test_adopters_keep_their_numbers(adopter: str, mode: Mode):
    name, make = ADOPTERS[adopter]
    eager = make()
    ours = lend(name, copy.deepcopy(eager), mode)
    x = torch.randn(3, 5, 24)
    assert "forward" in ours.__dict__
    assert fused_op(ours, x)
    backend = "aot_eager" if Mode.TRAINING in mode else "eager"
    call = torch.compile(ours, backend=backend, fullgraph=True) if Mode.TORCH_COMPILE in mode else ours
    if Mode.TRAINING in mode:
        assert_equal_steps(call, eager, x)
    else:
        with torch.no_grad():
            torch.testing.assert_close(call(x), eager(x))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    "name, bias, compiled",
    [
        *((name, bias, False) for name in ("GeGLUMLP", "SwiGLUMLP", "GLUMLP") for bias in (False, True)),
        ("GeGLUMLP", True, True),
    ],
)
def test_every_activation_is_computed_as_the_adopter_means_it(name: str, act: str, bias: bool, compiled: bool):
    eager = Gated(ACTS[act](), bias)
    ours = lend(name, copy.deepcopy(eager))
    x = torch.randn(7, 24)
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    assert_equal_steps(call, eager, x)
    meant = {"GeGLUMLP": ("gelu", "gelu_tanh"), "SwiGLUMLP": ("silu",), "GLUMLP": ("silu", "gelu", "gelu_tanh", "relu")}
    assert fused_op(ours, x) is (act in meant[name])
    if act not in meant[name]:
        assert torch.equal(ours(x), eager(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [Scaled, Sliced])
def test_more_than_the_layer_computes_is_left_to_the_class(make: type[Gated], compiled: bool):
    eager = make(nn.SiLU())
    ours = lend("SwiGLUMLP", copy.deepcopy(eager))
    x = torch.randn(7, 24)
    call = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    assert torch.equal(call(x), eager(x))
    assert not fused_op(ours, x)
    assert not layers.condition("SwiGLUMLP")(ours)


SWITCHES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast on": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast on, of its own dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_forward_that_switches_a_mode_is_left_to_the_class(switch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Switching, "mode", staticmethod(SWITCHES[switch]))
    eager = Switching(nn.SiLU())
    ours = lend("SwiGLUMLP", copy.deepcopy(eager))
    x = torch.randn(7, 24, requires_grad=True)
    for outer in SWITCHES.values():
        with outer():
            y, wanted = ours(x), eager(x)
        assert (y.dtype, y.requires_grad) == (wanted.dtype, wanted.requires_grad)
        assert torch.equal(y, wanted)
    assert "switches gradients or autocast" in fusedmlp.explain_plan(ours, x).notes[0].reason
    with pytest.raises(ValueError, match="switches gradients or autocast"):
        fusedmlp.FusedSwiGLUMLP.from_module(eager)


def test_reading_leaves_the_modes_as_they_were():
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        before = modes()
        assert layers.condition("GLUMLP")(Gated(nn.SiLU()))
        fusedmlp.FusedSwiGLUMLP.from_module(Gated(nn.SiLU()))
        assert modes() == before


def change_act(m: Any) -> None:
    m.act_fn = nn.ReLU()


def change_gelu(m: Any) -> None:
    m.act_fn.approximate = "none"


def hook_act(m: Any) -> None:
    m.act_fn.register_forward_hook(lambda module, args, y: y + 1)


def hook_linear(m: Any) -> None:
    m.up_proj.register_forward_hook(lambda module, args, y: y + 1)


def replace_linear(m: Any) -> None:
    m.up_proj = nn.Sequential(m.up_proj, nn.Tanh())


def change_forward(m: Any) -> None:
    m.act_fn.forward = lambda x: x.sin()


# Whether hooks are there is no guard of compiled code, of an eager module's neither: torch.compile documents it.
CHANGES = [change_act, change_gelu, replace_linear]
UNGUARDED = [hook_act, hook_linear, change_forward]


@pytest.mark.parametrize(
    "change, compiled",
    [*((f, False) for f in CHANGES + UNGUARDED), *((f, True) for f in CHANGES)],
    ids=lambda f: getattr(f, "__name__", None),
)
def test_changes_after_the_first_call_are_seen(change: Callable[[nn.Module], None], compiled: bool):
    eager = Gated(nn.GELU(approximate="tanh"))
    ours = lend("GeGLUMLP", copy.deepcopy(eager))
    x = torch.randn(7, 24)
    call = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(call(x), eager(x))
    assert fused_op(ours, x)
    change(ours)
    change(eager)
    torch.testing.assert_close(call(x), eager(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_attribute_that_the_forward_reads_is_watched(compiled: bool):
    eager = Limited()
    ours = lend("LinearReLU", copy.deepcopy(eager))
    x = torch.randn(7, 24)
    call = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(call(x), eager(x))
    for limit in (0.1, None):
        ours.limit = eager.limit = limit
        torch.testing.assert_close(call(x), eager(x))
        assert fused_op(ours, x) is (limit is None)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_method_may_be_another_on_the_instance(compiled: bool):
    eager = Helped()
    ours = lend("LinearAct", copy.deepcopy(eager))
    x = torch.randn(7, 24)
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(call(x), eager(x))
    assert fused_op(ours, x)
    for act, known in ((F.silu, True), (torch.sin, False)):
        ours.act = eager.act = act
        torch.testing.assert_close(call(x), eager(x))
        assert fused_op(ours, x) is known


def test_a_forward_patched_on_the_class_is_seen(monkeypatch: pytest.MonkeyPatch):
    ours = lend("SwiGLUMLP", Gated(nn.SiLU()))
    x = torch.randn(7, 24)
    before = ours(x)
    monkeypatch.setattr(Gated, "forward", lambda self, x: -self.up_proj(x))
    assert before.shape == (7, 24)
    assert torch.equal(ours(x), -ours.up_proj(x))


def test_compiled_code_serves_every_module_that_is_alike():
    """As where each block of a model is compiled by itself."""
    counter = CompileCounterWithBackend("eager")
    x = torch.randn(5, 24)
    for make in (lambda: Gated(nn.SiLU()), Functional):
        before = counter.frame_count
        for _ in range(10):
            ours = lend("GLUMLP" if make is not Functional else "MLP", make())
            torch.testing.assert_close(torch.compile(ours, backend=counter, fullgraph=True)(x), ours(x))
        assert counter.frame_count == before + 1


def test_one_graph_may_hold_modules_that_differ():
    eager = nn.ModuleList(
        [Gated(nn.SiLU()), Gated(nn.ReLU(), True), Scaled(nn.SiLU()), Gated(nn.GELU()), Gated(nn.SiLU())]
    )
    ours = nn.ModuleList([lend("GLUMLP", copy.deepcopy(m)) for m in eager])

    def model(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x)
        return x

    x = torch.randn(5, 24)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ours, x), model(eager, x))
    ours[3].act_fn = eager[3].act_fn = nn.ReLU()
    torch.testing.assert_close(compiled(ours, x), model(eager, x))


def test_reading_runs_nothing_of_the_children():
    class Trap(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise AssertionError("called")

    module = Gated(nn.SiLU())
    module.up_proj = Trap(24, 40)
    assert layers.condition("GLUMLP")(module)
    with pytest.raises(AssertionError, match="called"):  # no plain Linear: called, never read around
        lend("GLUMLP", module)(torch.randn(2, 24))


KEYWORDS = {"gemma": "x", "llama": "x", "clip": "hidden_states", "bert": "hidden_states", "sequential": "input"}


@pytest.mark.parametrize("adopter", KEYWORDS)
def test_adopters_are_called_by_keyword_too(adopter: str):
    name, make = ADOPTERS[adopter]
    eager = make()
    ours = lend(name, copy.deepcopy(eager))
    x = torch.randn(3, 24)
    torch.testing.assert_close(ours(**{KEYWORDS[adopter]: x}), eager(x))


def test_a_packed_mlp_is_left_to_its_class():
    config = ModernBertConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    eager = ModernBertMLP(config).eval()
    ours = lend("GeGLUMLP", copy.deepcopy(eager))
    x = torch.randn(3, 24)
    assert torch.equal(ours(x), eager(x))
    assert not fused_op(ours, x)


def test_an_adopter_can_be_copied_and_pickled():
    eager = LlamaMLP(LlamaConfig(**SIZES))
    ours = lend("SwiGLUMLP", copy.deepcopy(eager))
    x = torch.randn(3, 24)
    ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(x), eager(x))
        with torch.no_grad():
            other.down_proj.weight.zero_()
        assert other(x).abs().max() == 0
        torch.testing.assert_close(ours(x), eager(x))


@pytest.mark.parametrize("name", _COMPUTES)
def test_condition_says_what_is_adopted(name: str):
    fits = {n for n, (layer, _) in ADOPTERS.items() if layer == name}
    assert fits
    for adopter in fits:
        assert layers.condition(name)(ADOPTERS[adopter][1]())
    assert not layers.condition(name)(nn.Sequential(nn.Linear(24, 40), nn.Tanh()))
    untouched = lend(name, Scaled(nn.SiLU()), condition=layers.condition(name))
    assert "forward" not in untouched.__dict__ or untouched.forward.__func__ is Scaled.forward


def test_condition_names_what_there_is():
    with pytest.raises(ValueError, match="no stateless layer is called 'GeGLU'; there are: GLUMLP, GeGLUMLP,"):
        layers.condition("GeGLU")


@pytest.mark.parametrize("name", _COMPUTES)
def test_a_stateless_layer_alone_says_what_to_use(name: str):
    with pytest.raises(TypeError, match=f"use Fused{name} for a layer of its own"):
        getattr(layers, name)()(torch.randn(2, 24))
    assert hasattr(layers, f"Fused{name}")


def test_every_class_of_layers_is_one_or_the_other():
    classes = {n for n in layers.__all__ if isinstance(getattr(layers, n), type)}
    assert classes == set(_COMPUTES) | {n for n in classes if n.startswith("Fused")}
    assert all(getattr(layers, n).has_backward and getattr(layers, n).can_torch_compile for n in _COMPUTES)
