"""patch() and unpatch() on real Hugging Face models of tiny random configs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ElectraConfig,
    ElectraModel,
    FalconH1Config,
    Gemma2Config,
    Gemma2Model,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    OPTConfig,
    OPTModel,
    PhiConfig,
    PhiModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.vit import modeling_vit

import fusedmlp
from fusedmlp.integrations import transformers as patching
from fusedmlp.integrations._dense_act import FusedDenseAct

D, H = 16, 24
SIZES = {"hidden_size": D, "intermediate_size": H, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = SIZES | {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 1, "head_dim": 8}
IMAGE = SIZES | {"image_size": 8, "patch_size": 4}

HAS_VIT_MLP = hasattr(modeling_vit, "ViTMLP")  # releases before 5 split it into two modules

Build = Callable[[], PreTrainedModel]
REPLACED: dict[str, tuple[Build, str, str]] = {
    "bert": (lambda: BertModel(BertConfig(**TEXT)), "BertIntermediate", "FusedDenseAct"),
    "roberta": (lambda: RobertaModel(RobertaConfig(**TEXT)), "RobertaIntermediate", "FusedDenseAct"),
    "electra": (
        lambda: ElectraModel(ElectraConfig(embedding_size=D, **TEXT)),
        "ElectraIntermediate",
        "FusedDenseAct",
    ),
    "llama": (lambda: LlamaModel(LlamaConfig(mlp_bias=True, **TEXT)), "LlamaMLP", "FusedGLUMLP"),
    "gemma2": (lambda: Gemma2Model(Gemma2Config(**GROUPED)), "Gemma2MLP", "FusedGLUMLP"),
    "qwen3": (lambda: Qwen3Model(Qwen3Config(**GROUPED)), "Qwen3MLP", "FusedGLUMLP"),
    "mistral": (lambda: MistralModel(MistralConfig(**GROUPED)), "MistralMLP", "FusedGLUMLP"),
    "vit": (
        lambda: ViTModel(ViTConfig(**IMAGE)),
        "ViTMLP" if HAS_VIT_MLP else "ViTIntermediate",
        "FusedMLP" if HAS_VIT_MLP else "FusedDenseAct",
    ),
    "clip": (lambda: CLIPVisionModel(CLIPVisionConfig(**IMAGE)), "CLIPMLP", "FusedMLP"),
    "siglip": (lambda: SiglipVisionModel(SiglipVisionConfig(**IMAGE)), "SiglipMLP", "FusedMLP"),
    "phi": (lambda: PhiModel(PhiConfig(**TEXT)), "PhiMLP", "FusedMLP"),
}
LEFT: dict[str, tuple[Build, str, str]] = {
    "gpt2": (
        lambda: GPT2Model(GPT2Config(vocab_size=40, n_embd=D, n_layer=1, n_head=2)),
        "GPT2MLP",
        "Conv1D",
    ),
    "bloom": (
        lambda: BloomModel(BloomConfig(vocab_size=40, hidden_size=D, n_layer=1, n_head=2)),
        "BloomMLP",
        "resid",
    ),
    "t5": (
        lambda: T5EncoderModel(T5Config(vocab_size=40, d_model=D, d_ff=H, num_layers=1, num_heads=2, d_kv=8)),
        "T5DenseActDense",
        "dropout",
    ),
    "modernbert": (lambda: ModernBertModel(ModernBertConfig(**TEXT)), "ModernBertMLP", "packed"),
    "opt": (
        lambda: OPTModel(OPTConfig(ffn_dim=H, word_embed_proj_dim=D, **TEXT)),
        "OPTDecoderLayer",
        "part of a larger layer",
    ),
}


def built(build: Build) -> PreTrainedModel:
    torch.manual_seed(2)
    return build().eval()


def outputs(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if model.main_input_name == "pixel_values":
        return model(pixel_values=torch.randn(2, 3, 8, 8, generator=generator)).last_hidden_state
    return model(input_ids=torch.randint(3, 40, (2, 5), generator=generator)).last_hidden_state


@pytest.mark.parametrize("name", list(REPLACED))
def test_known_models_are_patched_and_restored(name: str) -> None:
    build, old, new = REPLACED[name]
    model = built(build)
    modules = dict(model.named_modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, keys = outputs(model), list(model.state_dict())
    report = fusedmlp.patch(model)
    assert {(r.old, r.new) for r in report.replaced} == {(old, new)}
    assert len(report.replaced) >= 2 and report.left == []
    for row in report.replaced:
        assert type(model.get_submodule(row.name)).__name__ == new and row.name in str(report)
    assert list(model.state_dict()) == keys
    after = outputs(model)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    after.square().sum().backward()
    optimizer.step()  # made before patch(): it updates the weights that are used
    assert not torch.equal(outputs(model), before)
    other = built(build)
    model.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(outputs(model), after)
    other.load_state_dict(model.state_dict(), strict=True)
    assert fusedmlp.unpatch(model) == [r.name for r in report.replaced]
    assert all(m is modules[n] for n, m in model.named_modules()) and len(modules) == len(list(model.named_modules()))


@pytest.mark.parametrize("name", list(LEFT))
def test_others_are_left_with_the_reason(name: str) -> None:
    build, cls, reason = LEFT[name]
    model = built(build)
    modules = list(model.modules())
    report = fusedmlp.patch(model)
    assert report.replaced == []
    assert report.left and all(row.cls == cls and reason in row.reason for row in report.left)
    assert all(a is b for a, b in zip(modules, model.modules()))
    assert report.left[0].name in str(report) and report.left[0].reason in str(report)


def test_gradients_equal_eager() -> None:
    eager, fused = built(REPLACED["llama"][0]), built(REPLACED["llama"][0])
    fusedmlp.patch(fused, recompute=True)
    assert fused.layers[0].mlp.recompute
    for model in (eager, fused):
        outputs(model).square().sum().backward()
    for (key, ours), theirs in zip(fused.named_parameters(), eager.parameters()):
        assert torch.equal(ours.grad, theirs.grad), key


def test_keeping_the_activation_is_for_gated_layers() -> None:
    gated, two_layer = built(REPLACED["llama"][0]), built(REPLACED["phi"][0])
    for model in (gated, two_layer):
        assert fusedmlp.patch(model, keep_activation=True).replaced
    assert gated.layers[0].mlp.keep_activation and not gated.layers[0].mlp.recompute
    assert not hasattr(two_layer.layers[0].mlp, "keep_activation")


def test_sparse_gemma3n_and_scaled_falcon_h1_are_left() -> None:
    text = Gemma3nTextConfig(
        vocab_size=40,
        hidden_size=D,
        intermediate_size=[H, H],
        num_hidden_layers=2,
        activation_sparsity_pattern=[0.9, 0.0],
    )
    scaled = FalconH1Config(hidden_size=D, intermediate_size=H, mlp_multipliers=[2.0, 0.5])
    model = nn.ModuleList([Gemma3nTextMLP(text, 0), Gemma3nTextMLP(text, 1), FalconH1MLP(scaled)])
    report = fusedmlp.patch(model)
    assert [r.name for r in report.replaced] == ["1"]
    assert [r.name for r in report.left] == ["0", "2"]
    assert "activation_sparsity=0.9" in report.left[0].reason and "constants" in report.left[1].reason
    with pytest.raises(ValueError, match=r"gate_proj\(x\) \* 2\.0.* \* 0\.5"):
        fusedmlp.FusedGLUMLP.from_module(FalconH1MLP(scaled))


def test_patching_twice_changes_nothing() -> None:
    model = built(REPLACED["bert"][0])
    first = fusedmlp.patch(model)
    modules = list(model.modules())
    second = fusedmlp.patch(model)
    assert second.replaced == [] and all("already" in row.reason for row in second.left)
    assert [row.name for row in second.left] == [row.name for row in first.replaced]
    assert all(a is b for a, b in zip(modules, model.modules()))
    assert fusedmlp.unpatch(second) == [] and fusedmlp.unpatch(first) == [row.name for row in first.replaced]
    assert fusedmlp.unpatch(first) == [] and fusedmlp.unpatch(model) == []


def test_children_that_are_not_plain_are_left() -> None:
    model = built(REPLACED["llama"][0])
    model.layers[0].mlp.up_proj.register_forward_hook(lambda m, args, out: out)
    nn.utils.parametrizations.weight_norm(model.layers[1].mlp.down_proj)
    report = fusedmlp.patch(model)
    assert report.replaced == []
    assert [row.reason.split()[0] for row in report.left] == ["up_proj", "down_proj"]
    assert "forward hook" in report.left[0].reason and "ParametrizedLinear" in report.left[1].reason


def test_hooks_and_replaced_forwards_of_the_mlp_itself_are_kept() -> None:
    model = built(REPLACED["llama"][0])
    seen: list[str] = []
    model.layers[0].mlp.register_forward_hook(lambda m, args, out: seen.append("hook"))
    original = model.layers[1].mlp.forward
    model.layers[1].mlp.forward = lambda x: original(x) * 2
    before = outputs(model)
    report = fusedmlp.patch(model)
    assert report.replaced == [] and len(report.left) == 2
    assert torch.equal(outputs(model), before) and len(seen) == 2


def test_failure_in_the_middle_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(nn.ModuleDict):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "second" and isinstance(value, fusedmlp.FusedGLUMLP):
                raise OSError("no")
            super().__setattr__(name, value)

    mlps = built(REPLACED["llama"][0]).layers
    model = Stubborn({"first": mlps[0].mlp, "second": mlps[1].mlp})
    modules = list(model.modules())
    with pytest.raises(OSError, match="no"):
        fusedmlp.patch(model)
    assert all(a is b for a, b in zip(modules, model.modules())) and len(modules) == len(list(model.modules()))
    assert fusedmlp.unpatch(model) == []

    def broken(*args: object, **kwargs: object) -> None:
        raise MemoryError("full")

    model = built(REPLACED["llama"][0])
    modules = list(model.modules())
    convert, calls = patching._convert, []

    def fails_late(module: nn.Module, *rest: object) -> object:
        calls.append(module)
        return broken() if module is model.layers[1].mlp else convert(module, *rest)

    monkeypatch.setattr(patching, "_convert", fails_late)
    with pytest.raises(MemoryError):
        fusedmlp.patch(model)
    assert model.layers[0].mlp in calls and all(a is b for a, b in zip(modules, model.modules()))


def test_adapters_put_on_a_patched_model_survive_unpatch() -> None:
    model = built(REPLACED["llama"][0])
    fusedmlp.patch(model)
    other = nn.Linear(D, H)
    model.layers[0].mlp.gate_proj = other
    model.train()
    fusedmlp.unpatch(model)
    assert model.layers[0].mlp.gate_proj is other
    assert all(m.training for m in model.modules())


def test_a_copy_of_a_patched_model_can_be_unpatched() -> None:
    model = built(REPLACED["llama"][0])
    before = outputs(model)
    fusedmlp.patch(model)
    clone = copy.deepcopy(model)
    assert len(fusedmlp.unpatch(clone)) == 2
    assert type(clone.layers[0].mlp).__name__ == "LlamaMLP"
    assert clone.layers[0].mlp.up_proj.weight.data_ptr() != model.layers[0].mlp.up_proj.weight.data_ptr()
    assert torch.equal(outputs(clone), before) and torch.equal(outputs(model), before)


def test_a_module_used_in_two_places_stays_one_module() -> None:
    mlp = built(REPLACED["llama"][0]).layers[0].mlp
    model = nn.ModuleDict({"a": mlp, "b": mlp})
    report = fusedmlp.patch(model)
    assert model["a"] is model["b"] and [r.name for r in report.replaced] == ["a", "b"]
    fusedmlp.unpatch(report)
    assert model["a"] is mlp and model["b"] is mlp


def test_the_model_itself_and_unknown_classes_are_reported() -> None:
    mlp = built(REPLACED["llama"][0]).layers[0].mlp
    report = fusedmlp.patch(mlp)
    assert [(r.name, r.cls) for r in report.left] == [("", "LlamaMLP")] and "from_module" in report.left[0].reason

    class HouseMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class ClampedMLP(HouseMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(max=1)

    model = nn.ModuleList([HouseMLP(), ClampedMLP()])
    report = fusedmlp.patch(model)
    assert report.replaced == [] and all("extra_classes" in r.reason for r in report.left)
    x = torch.randn(3, D)
    before = model[0](x)
    report = fusedmlp.patch(model, extra_classes=[HouseMLP, "ClampedMLP"])
    assert [r.name for r in report.replaced] == ["0"] and torch.equal(model[0](x), before)
    assert [r.name for r in report.left] == ["1"] and "clamp" in report.left[0].reason


def test_sequential_stacks_only_when_asked() -> None:
    def stack(*last: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D), *last)

    model = nn.ModuleDict({"whole": stack(nn.ReLU()), "head": stack(), "other": nn.Sequential(nn.Linear(D, D))})
    keys, x = list(model.state_dict()), torch.randn(3, D)
    report = fusedmlp.patch(model)
    assert report.replaced == [] and report.left == []
    before = model["whole"](x)
    report = fusedmlp.patch(model, sequential=True)
    assert [(r.name, r.new) for r in report.replaced] == [("whole", "FusedReLUMLP")]
    assert [r.name for r in report.left] == ["head"] and "followed by a ReLU" in report.left[0].reason
    assert list(model.state_dict()) == keys and torch.equal(model["whole"](x), before)


def test_dense_act_respects_its_child() -> None:
    model = built(REPLACED["bert"][0])
    fusedmlp.patch(model)
    layer = model.encoder.layer[0].intermediate
    assert isinstance(layer, FusedDenseAct) and list(inspect.signature(layer.forward).parameters) == ["hidden_states"]
    x = torch.randn(3, D)
    before = layer(hidden_states=x)
    layer.dense.register_forward_hook(lambda m, args, out: out * 0)
    assert torch.equal(layer(x), torch.zeros_like(before)) and before.abs().sum() > 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="nn.Module, got int"):
        fusedmlp.patch(3)
    with pytest.raises(TypeError, match="extra_classes"):
        fusedmlp.patch(nn.Identity(), extra_classes="HouseMLP")
    with pytest.raises(TypeError, match="extra_classes"):
        fusedmlp.patch(nn.Identity(), extra_classes=[3])
    with pytest.raises(TypeError, match="report of patch"):
        fusedmlp.unpatch("model")
