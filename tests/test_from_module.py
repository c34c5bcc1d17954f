"""from_module(), from_config(): the eager module's own Parameters, numbers and names; else a refusal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    CLIPVisionConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    GemmaConfig,
    LlamaConfig,
    PhiConfig,
)
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssConfig, SeedOssMLP

import fusedmlp

D, H, OUT = 16, 24, 7
SIZES = {"hidden_size": D, "intermediate_size": H, "num_attention_heads": 2}
LLAMA = LlamaConfig(mlp_bias=True, **SIZES)


class NaiveMLP(nn.Module):
    """The one of every tutorial."""

    def __init__(self, last: bool = True) -> None:
        super().__init__()
        self.last = last
        self.layer1 = nn.Linear(D, H)
        self.layer2 = nn.Linear(H, H, bias=False)
        self.layer3 = nn.Linear(H, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layer1(x))
        x = torch.relu(self.layer2(x))
        x = self.layer3(x)
        return x.relu() if self.last else x


def sequential(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


ADOPTED = {
    "llama": (lambda: LlamaMLP(LLAMA), fusedmlp.FusedGLUMLP, "silu"),
    "llama_as_swiglu": (lambda: LlamaMLP(LLAMA), fusedmlp.FusedSwiGLUMLP, "silu"),
    "gemma2": (lambda: Gemma2MLP(Gemma2Config(**SIZES)), fusedmlp.FusedGeGLUMLP, "gelu_tanh"),
    "clip": (lambda: CLIPMLP(CLIPVisionConfig(**SIZES)), fusedmlp.FusedMLP, "quick_gelu"),
    "phi": (lambda: PhiMLP(PhiConfig(**SIZES)), fusedmlp.FusedMLP, "gelu_tanh"),
    "seed_oss_without_dropout": (
        lambda: SeedOssMLP(SeedOssConfig(residual_dropout=0.0, head_dim=8, **SIZES)),
        fusedmlp.FusedGLUMLP,
        "silu",
    ),
    "naive": (NaiveMLP, fusedmlp.FusedReLUMLP, None),
    "stack": (
        lambda: sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, OUT), nn.ReLU(inplace=True)),
        fusedmlp.FusedReLUMLP,
        None,
    ),
}
SEQUENTIAL = {
    "linear_act": (lambda: sequential(nn.Linear(D, OUT), nn.SiLU()), fusedmlp.FusedLinearAct, "silu"),
    "linear_gelu_tanh": (
        lambda: sequential(nn.Linear(D, OUT, bias=False), nn.GELU("tanh")),
        fusedmlp.FusedLinearAct,
        "gelu_tanh",
    ),
    "linear_relu": (lambda: sequential(nn.Linear(D, OUT), nn.ReLU()), fusedmlp.FusedLinearReLU, "relu"),
    "mlp": (lambda: sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, OUT)), fusedmlp.FusedMLP, "gelu"),
    "mlp_no_dropout": (
        lambda: sequential(nn.Linear(D, H), nn.ReLU(), nn.Dropout(0.0), nn.Linear(H, OUT), nn.Identity()),
        fusedmlp.FusedMLP,
        "relu",
    ),
}
ALL = ADOPTED | SEQUENTIAL


@pytest.mark.parametrize("name", list(ALL))
def test_same_numbers_from_the_same_parameters(name: str) -> None:
    make, cls, activation = ALL[name]
    eager = make().eval()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)
    fused = cls.from_module(eager)
    assert type(fused) is cls and not fused.training
    assert activation is None or fused.activation == activation
    assert {id(p) for p in fused.parameters()} == {id(p) for p in eager.parameters()}
    x = torch.randn(5, D, requires_grad=True)
    before = fused(x)
    expected = eager(x)
    torch.testing.assert_close(before, expected, rtol=1e-6, atol=1e-7)
    if not name.startswith("phi"):  # its GELU is written out in Hugging Face
        assert torch.equal(before, expected)
    fused(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(fused(x), before)
    torch.testing.assert_close(fused(x), eager(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", list(ADOPTED))
def test_names_stay_and_load_strictly_both_ways(name: str) -> None:
    make, cls, _ = ADOPTED[name]
    eager, fused = make(), cls.from_module(make())
    assert list(fused.state_dict()) == list(eager.state_dict())
    fused.load_state_dict(eager.state_dict(), strict=True)
    x = torch.randn(5, D)
    torch.testing.assert_close(fused(x), eager(x), rtol=1e-6, atol=1e-7)
    make().load_state_dict(fused.state_dict(), strict=True)


@pytest.mark.parametrize("name", list(ALL))
def test_flags_dtype_and_device_are_kept(name: str) -> None:
    make, cls, _ = ALL[name]
    eager = make().to(torch.bfloat16).to("meta").train()
    next(eager.parameters()).requires_grad_(False)
    fused = cls.from_module(eager)
    assert fused.training
    assert all(p.dtype == torch.bfloat16 and p.is_meta for p in fused.parameters())
    assert [p.requires_grad for p in fused.parameters()] == [p.requires_grad for p in eager.parameters()]


def test_children_are_the_same_objects_and_their_hooks_run() -> None:
    eager = LlamaMLP(LLAMA)
    eager.up_proj.register_forward_hook(lambda m, args, out: out * 2)
    fused = fusedmlp.FusedGLUMLP.from_module(eager, recompute=True)
    assert fused.recompute and fused.up_proj is eager.up_proj
    kept = fusedmlp.FusedGLUMLP.from_module(eager, keep_activation=True)
    assert kept.keep_activation and not (kept.recompute or fused.keep_activation)
    with pytest.raises(ValueError, match="contradict each other"):
        fusedmlp.FusedGLUMLP.from_module(eager, recompute=True, keep_activation=True)
    x = torch.randn(5, D)
    assert torch.equal(fused(x), eager(x))


def test_a_linear_with_a_stated_activation() -> None:
    linear = nn.Linear(D, OUT)
    fused = fusedmlp.FusedLinearAct.from_module(linear, activation="gelu_new")
    assert fused.weight is linear.weight and fused.bias is linear.bias and fused.activation == "gelu_tanh"
    assert fusedmlp.FusedLinearReLU.from_module(linear, "relu").weight is linear.weight
    assert fusedmlp.FusedLinearAct.from_module(nn.Linear(D, OUT, bias=False), "relu").bias is None
    intermediate = BertIntermediate(BertConfig(**SIZES))
    x = torch.randn(5, D)
    fused = fusedmlp.FusedLinearAct.from_module(intermediate.dense, BertConfig().hidden_act)
    assert torch.equal(fused(x), intermediate(x))


class Bare(nn.Module):
    """gate/up/down with another forward for each case."""

    def __init__(self, forward, **parts: object) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)
        self.fc1, self.fc2 = None, None
        for name, part in parts.items():
            setattr(self, name, part)
        self.computes = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.computes(self, x)


def glu(m: Bare, x: Tensor) -> Tensor:
    return m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))


def doubled_in_place(m: Bare, x: Tensor) -> Tensor:
    h = F.silu(m.gate_proj(x))
    x.mul_(2)
    return m.down_proj(h * m.up_proj(x))


NOT_THE_SAME = {
    "in_place": (doubled_in_place, {}, "mul_"),
    "only_in_training": (lambda m, x: glu(m, x) + 1 if m.training else glu(m, x), {}, "in training"),
    "only_in_evaluation": (lambda m, x: glu(m, x) if m.training else glu(m, x) + 1, {}, "in evaluation"),
    "dropout_by_name": (lambda m, x: F.dropout(input=glu(m, x), p=0.1), {}, "dropout"),
    "unused_work": (lambda m, x: (m.up_proj(x), glu(m, x))[1], {}, "does not use"),
    "scaled": (lambda m, x: glu(m, x) * 2.0, {}, "2.0"),
    "gate_scaled": (lambda m, x: m.down_proj(F.silu(m.gate_proj(x) * 0.5) * m.up_proj(x)), {}, "0.5"),
    "residual": (lambda m, x: glu(m, x) + x, {}, "add"),
    "clamped": (lambda m, x: m.down_proj(F.silu(m.gate_proj(x)).clamp(max=1) * m.up_proj(x)), {}, "clamp"),
    "float": (lambda m, x: m.down_proj(F.silu(m.gate_proj(x).float()) * m.up_proj(x)), {}, "float"),
    "act_on_up": (lambda m, x: m.down_proj(m.gate_proj(x) * F.silu(m.up_proj(x))), {}, "silu"),
    "two_activations": (lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * F.silu(m.up_proj(x))), {}, "silu"),
    "up_twice": (lambda m, x: m.down_proj(F.silu(m.up_proj(x)) * m.up_proj(x)), {}, "up_proj"),
    "two_outputs": (lambda m, x: (glu(m, x), x), {}, "return"),
    "data_dependent": (lambda m, x: glu(m, x) if x.sum() > 0 else x, {}, "cannot read"),
    "unknown_activation": (lambda m, x: m.down_proj(F.elu(m.gate_proj(x)) * m.up_proj(x)), {}, "elu"),
    "unknown_gelu": (
        lambda m, x: m.down_proj(m.act(m.gate_proj(x)) * m.up_proj(x)),
        {"act": nn.LeakyReLU()},
        "Leaky",
    ),
    "dropout": (
        lambda m, x: m.down_proj(m.drop(F.silu(m.gate_proj(x)) * m.up_proj(x))),
        {"drop": nn.Dropout(0.1)},
        "drop",
    ),
    "functional_dropout": (lambda m, x: F.dropout(glu(m, x), p=0.1, training=m.training), {}, "dropout"),
    "norm": (glu, {"norm": nn.LayerNorm(D)}, "norm"),
    "own_parameter": (glu, {"scale": nn.Parameter(torch.ones(1))}, "scale"),
    "sizes": (glu, {"up_proj": nn.Linear(D, H + 1)}, "up_proj gives 25 features, down_proj takes 24"),
    "inputs": (glu, {"up_proj": nn.Linear(D + 1, H)}, "gate_proj takes 16 features and up_proj 17"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(NOT_THE_SAME))
def test_another_computation_is_refused(name: str, training: bool) -> None:
    forward, parts, said = NOT_THE_SAME[name]
    eager = Bare(forward, **parts).train(training)
    with pytest.raises(ValueError) as caught:
        fusedmlp.FusedGLUMLP.from_module(eager)
    assert said in str(caught.value) and "Bare" in str(caught.value)
    assert fusedmlp.FusedGLUMLP.from_module(Bare(glu)).activation == "silu"


class OtherLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_other_kinds_of_modules_and_children_are_refused() -> None:
    for cls in (fusedmlp.FusedGLUMLP, fusedmlp.FusedMLP, fusedmlp.FusedReLUMLP, fusedmlp.FusedLinearAct):
        with pytest.raises(TypeError, match="takes an nn.Module, got str"):
            cls.from_module("LlamaMLP")
        with pytest.raises(TypeError, match="fused already"):
            cls.from_module(fusedmlp.FusedMLP(D, H))
    with pytest.raises(TypeError, match=r"gate_proj is a OtherLinear; only a plain nn\.Linear"):
        fusedmlp.FusedGLUMLP.from_module(Bare(glu, gate_proj=OtherLinear(D, H)))
    with pytest.raises(TypeError, match="GPT2MLP has no child fc1; its children are c_fc, c_proj"):
        fusedmlp.FusedMLP.from_module(GPT2MLP(H, GPT2Config(n_embd=D)))
    with pytest.raises(TypeError, match="no child gate_proj"):
        fusedmlp.FusedGLUMLP.from_module(CLIPMLP(CLIPVisionConfig(**SIZES)))
    with pytest.raises(TypeError, match="Conv1d"):
        fusedmlp.FusedLinearAct.from_module(nn.Conv1d(1, 1, 1), "relu")
    hooked = nn.Linear(D, OUT)
    hooked.register_forward_hook(lambda m, args, out: out)
    with pytest.raises(TypeError, match="forward hook"):
        fusedmlp.FusedLinearAct.from_module(hooked, "relu")


def test_hooks_on_the_module_itself_are_not_dropped() -> None:
    eager = LlamaMLP(LLAMA)
    handle = eager.register_forward_pre_hook(lambda m, args: None)
    with pytest.raises(ValueError, match="forward pre-hook"):
        fusedmlp.FusedGLUMLP.from_module(eager)
    handle.remove()
    handle = eager.register_state_dict_post_hook(lambda m, state, prefix, metadata: None)
    with pytest.raises(ValueError, match="_state_dict_hooks"):
        fusedmlp.FusedGLUMLP.from_module(eager)
    handle.remove()
    eager.act_fn.register_forward_hook(lambda m, args, out: out)
    with pytest.raises(ValueError, match="act_fn has a forward hook"):
        fusedmlp.FusedGLUMLP.from_module(eager)


def test_stacks_that_are_no_stacks() -> None:
    cases = {
        "no last ReLU": NaiveMLP(last=False),
        "no ReLU": sequential(nn.Linear(D, D), nn.Linear(D, D), nn.ReLU()),
        "another activation": sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.ReLU()),
        "a norm": sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU()),
        "a dropout": sequential(nn.Linear(D, D), nn.ReLU(), nn.Dropout(0.5)),
        "sizes": sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(D, D), nn.ReLU()),
        "nothing": sequential(),
        "only ReLU": sequential(nn.ReLU()),
    }
    for name, eager in cases.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            fusedmlp.FusedReLUMLP.from_module(eager)
        assert str(caught.value), name
    shared = nn.Linear(D, D)
    with pytest.raises(ValueError, match="twice"):
        fusedmlp.FusedReLUMLP.from_module(sequential(shared, nn.ReLU(), shared, nn.ReLU()))


def test_a_stated_activation_must_not_contradict_the_module() -> None:
    with pytest.raises(ValueError, match="applies silu, but activation='gelu'"):
        fusedmlp.FusedGLUMLP.from_module(LlamaMLP(LLAMA), activation="gelu")
    assert fusedmlp.FusedGLUMLP.from_module(LlamaMLP(LLAMA), activation="swish").activation == "silu"
    for cls in (fusedmlp.FusedGeGLUMLP,):
        with pytest.raises(ValueError, match="FusedGeGLUMLP computes gelu_tanh or gelu, got activation 'silu'"):
            cls.from_module(LlamaMLP(LLAMA))
    with pytest.raises(ValueError, match="needs activation="):
        fusedmlp.FusedLinearAct.from_module(nn.Linear(D, OUT))

    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(x)

    own = Bare(lambda m, x: m.down_proj(m.act(m.gate_proj(x)) * m.up_proj(x)), act=Swish())
    with pytest.raises(ValueError, match="not known: act = Swish"):
        fusedmlp.FusedGLUMLP.from_module(own)
    x = torch.randn(3, D)
    assert torch.equal(fusedmlp.FusedGLUMLP.from_module(own, activation="silu")(x), own(x))


CONFIGS = {
    "llama": (LLAMA, fusedmlp.FusedSwiGLUMLP, LlamaMLP),
    "llama_nobias": (LlamaConfig(**SIZES), fusedmlp.FusedGLUMLP, LlamaMLP),
    "gemma2": (Gemma2Config(**SIZES), fusedmlp.FusedGeGLUMLP, Gemma2MLP),
    "clip": (CLIPVisionConfig(**SIZES), fusedmlp.FusedMLP, CLIPMLP),
    "phi": (PhiConfig(**SIZES), fusedmlp.FusedMLP, PhiMLP),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_from_config_equals_the_eager_class(name: str) -> None:
    config, cls, eager_cls = CONFIGS[name]
    torch.manual_seed(5)
    fused = cls.from_config(config, dtype=torch.float64)
    torch.manual_seed(5)
    eager = eager_cls(config)
    assert list(fused.state_dict()) == list(eager.state_dict())
    assert type(fused) is cls and {p.dtype for p in fused.parameters()} == {torch.float64}
    eager.double().load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(3, D, dtype=torch.float64)
    torch.testing.assert_close(fused(x), eager(x))
    assert cls.from_config(config, device="meta", recompute=True).recompute
    if issubclass(cls, fusedmlp.FusedGLUMLP):
        assert cls.from_config(config, device="meta", keep_activation=True).keep_activation


def test_from_config_of_bert_is_the_intermediate_layer() -> None:
    fused = fusedmlp.FusedLinearAct.from_config(BertConfig(**SIZES))
    assert (fused.in_features, fused.out_features, fused.activation) == (D, H, "gelu")
    assert fusedmlp.FusedLinearAct.from_config(BertConfig(**SIZES), bias=False).bias is None


def test_from_config_refuses_what_it_cannot_represent() -> None:
    gated = fusedmlp.FusedGLUMLP
    with pytest.raises(ValueError, match="FusedSwiGLUMLP computes silu, got activation 'gelu_tanh'"):
        fusedmlp.FusedSwiGLUMLP.from_config(GemmaConfig(**SIZES))
    with pytest.raises(ValueError, match="FusedGeGLUMLP computes"):
        fusedmlp.FusedGeGLUMLP.from_config(LLAMA)
    with pytest.raises(ValueError, match="FusedLinearReLU computes relu"):
        fusedmlp.FusedLinearReLU.from_config(BertConfig(**SIZES))
    with pytest.raises(ValueError, match="mlp_multipliers"):
        gated.from_config(FalconH1Config(hidden_size=D, intermediate_size=H, mlp_multipliers=[2.0, 1.0]))
    with pytest.raises((TypeError, ValueError), match="intermediate_size|activation_sparsity"):
        gated.from_config(Gemma3nTextConfig(hidden_size=D))
    with pytest.raises(TypeError, match="has no intermediate_size"):
        gated.from_config(SimpleNamespace(hidden_size=D, hidden_act="silu"))
    with pytest.raises(TypeError, match="pass its text_config"):
        gated.from_config(SimpleNamespace(text_config=LLAMA))
    with pytest.raises(TypeError, match="hidden_act"):
        gated.from_config(SimpleNamespace(hidden_size=D, intermediate_size=H))
    with pytest.raises(ValueError, match="unknown activation 'mish'"):
        gated.from_config(SimpleNamespace(hidden_size=D, intermediate_size=H, hidden_act="mish"))
    both = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    with pytest.raises(ValueError, match="two activations"):
        gated.from_config(SimpleNamespace(hidden_size=D, intermediate_size=H, **both))
    with pytest.raises(ValueError, match=r"config\.hidden_size must be positive, got -4"):
        gated.from_config(SimpleNamespace(hidden_size=-4, intermediate_size=H, hidden_act="silu"))


def test_modules_that_take_or_wrap_more_are_refused() -> None:
    class TwoArguments(Bare):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return glu(self, x)

    class OwnCall(Bare):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    with pytest.raises(ValueError, match="takes x, scale; only one argument"):
        fusedmlp.FusedGLUMLP.from_module(TwoArguments(glu))
    with pytest.raises(ValueError, match="OwnCall has a __call__ of its own"):
        fusedmlp.FusedGLUMLP.from_module(OwnCall(glu))


def test_no_activation_is_the_identity() -> None:
    linear = nn.Linear(D, OUT)
    for eager in (sequential(linear), sequential(linear, nn.Identity())):
        fused = fusedmlp.FusedLinearAct.from_module(eager)
        assert fused.activation == "identity" and fused.weight is linear.weight
        with pytest.raises(ValueError, match="applies identity, but activation='relu'"):
            fusedmlp.FusedLinearAct.from_module(eager, "relu")
