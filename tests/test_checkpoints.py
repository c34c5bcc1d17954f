"""from_safetensors(): reads the layer's tensors and no others, and says what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import fusedmlp
from fusedmlp.integrations import checkpoints

D, H, OUT = 12, 20, 7
PREFIX = "model.layers.1.mlp"

Made = tuple[Callable[[], nn.Module], Callable[..., nn.Module]]
LAYERS: dict[str, Made] = {
    "linear_act": (
        lambda: fusedmlp.FusedLinearAct(D, OUT, activation="gelu"),
        lambda *a, **k: fusedmlp.FusedLinearAct.from_safetensors(*a, activation="gelu", **k),
    ),
    "linear_relu": (
        lambda: fusedmlp.FusedLinearReLU(D, OUT, bias=False),
        fusedmlp.FusedLinearReLU.from_safetensors,
    ),
    "mlp": (
        lambda: fusedmlp.FusedMLP(D, H, OUT, activation="silu", bias=(True, False)),
        lambda *a, **k: fusedmlp.FusedMLP.from_safetensors(*a, activation="silu", **k),
    ),
    "stack": (
        lambda: fusedmlp.FusedReLUMLP([D, H, H, OUT], bias=[True, False, True]),
        fusedmlp.FusedReLUMLP.from_safetensors,
    ),
    "glu": (
        lambda: fusedmlp.FusedGLUMLP(D, H, bias=(False, True, True), out_features=OUT),
        fusedmlp.FusedGLUMLP.from_safetensors,
    ),
    "geglu_tanh": (lambda: fusedmlp.FusedGeGLUMLP(D, H), fusedmlp.FusedGeGLUMLP.from_safetensors),
    "geglu_erf": (
        lambda: fusedmlp.FusedGeGLUMLP(D, H, approximate="none"),
        lambda *a, **k: fusedmlp.FusedGeGLUMLP.from_safetensors(*a, activation="gelu", **k),
    ),
    "swiglu": (lambda: fusedmlp.FusedSwiGLUMLP(D, H), fusedmlp.FusedSwiGLUMLP.from_safetensors),
}
each_layer = pytest.mark.parametrize("name", list(LAYERS))


def test_options_are_handed_on(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", fusedmlp.FusedSwiGLUMLP(D, H))
    for option in ("recompute", "keep_activation"):
        layer = fusedmlp.FusedSwiGLUMLP.from_safetensors(path, PREFIX, **{option: True})
        assert getattr(layer, option) and layer.recompute is not layer.keep_activation


def saved(path: Path, layer: nn.Module, prefix: str = PREFIX, **others: Tensor) -> Path:
    """A file that holds the layer under the prefix, next to tensors that are none of its business."""
    tensors = {f"{prefix}.{k}" if prefix else k: v for k, v in layer.state_dict().items()}
    if prefix:
        tensors |= {f"{prefix}2.fc1.weight": torch.ones(3), "lm_head.weight": torch.ones(4, 4)}
    save_file({k: v.contiguous() for k, v in (tensors | others).items()}, path)
    return path


@each_layer
@pytest.mark.parametrize("prefix", [PREFIX, ""], ids=["prefix", "whole_file"])
def test_the_layer_comes_back(name: str, prefix: str, tmp_path: Path) -> None:
    make, load = LAYERS[name]
    layer = make()
    path = saved(tmp_path / "model.safetensors", layer, prefix)
    loaded = load(path, prefix)
    assert type(loaded) is type(layer)
    assert repr(loaded) == repr(layer)
    x = torch.randn(3, D)
    assert torch.equal(loaded(x), layer(x))
    assert all(p.requires_grad and not p.is_meta for p in loaded.parameters())
    if prefix:
        assert torch.equal(load(str(path), prefix + ".")(x), layer(x))


@each_layer
def test_dtype_and_device(name: str, tmp_path: Path) -> None:
    make, load = LAYERS[name]
    layer = make().to(torch.bfloat16)
    path = saved(tmp_path / "model.safetensors", layer)
    assert {p.dtype for p in load(path, PREFIX).parameters()} == {torch.bfloat16}
    wide = load(path, PREFIX, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    x = torch.randn(3, D)
    assert torch.equal(wide(x), layer.float()(x))
    skeleton = load(path, PREFIX, device="meta")
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in skeleton.parameters())
    assert [p.shape for p in skeleton.parameters()] == [p.shape for p in layer.parameters()]


def test_a_real_model_file(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=D,
        intermediate_size=H,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    layer = fusedmlp.FusedSwiGLUMLP.from_safetensors(tmp_path / "model.safetensors", PREFIX)
    x = torch.randn(3, D)
    assert torch.equal(layer(x), model.model.layers[1].mlp(x))
    from_config = fusedmlp.FusedSwiGLUMLP.from_config(config)
    from_config.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(from_config(x), layer(x))


class Spy:
    """safe_open that remembers which tensors were read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.opened = real_safe_open(*args, **kwargs)

    def __enter__(self) -> Spy:
        self.file = self.opened.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.opened.__exit__(*exc)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        read.append(name)
        return self.file.get_tensor(name)


real_safe_open = safetensors.safe_open
read: list[str] = []


def test_reads_only_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fusedmlp.FusedMLP(D, H)
    path = saved(tmp_path / "model.safetensors", layer)
    monkeypatch.setattr(safetensors, "safe_open", Spy)
    read.clear()
    fusedmlp.FusedMLP.from_safetensors(path, PREFIX)
    assert sorted(read) == sorted(f"{PREFIX}.{k}" for k in layer.state_dict())
    read.clear()
    with pytest.raises(RuntimeError, match="missing"):
        fusedmlp.FusedGLUMLP.from_safetensors(path, PREFIX)
    assert read == []


@each_layer
def test_surplus_tensors_are_named(name: str, tmp_path: Path) -> None:
    make, load = LAYERS[name]
    extra = {f"{PREFIX}.router.weight": torch.ones(2, 2)}
    path = saved(tmp_path / "model.safetensors", make(), **extra)
    with pytest.raises(RuntimeError, match=r"surplus: router\.weight .*needed: .*weight"):
        load(path, PREFIX)


@each_layer
def test_missing_tensors_are_named(name: str, tmp_path: Path) -> None:
    make, load = LAYERS[name]
    first = next(iter(make().state_dict()))
    tensors = {f"{PREFIX}.{k}": v for k, v in make().state_dict().items() if k != first}
    save_file(tensors | {"other.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=f"missing: .*{first}"):
        load(tmp_path / "model.safetensors", PREFIX)
    with pytest.raises(RuntimeError, match=r"under the prefix 'nowhere\.'.*missing"):
        load(tmp_path / "model.safetensors", "nowhere")


@pytest.mark.parametrize(
    "name, key, shape",
    [
        ("linear_act", "bias", (OUT + 1,)),
        ("linear_act", "weight", (OUT,)),
        ("mlp", "fc2.weight", (OUT, H + 1)),
        ("mlp", "fc1.bias", (1, H)),
        ("mlp", "fc1.weight", (0, D)),
        ("stack", "2.weight", (H, H - 1)),
        ("glu", "up_proj.weight", (H, D + 2)),
        ("glu", "down_proj.weight", (OUT, H + 1)),
        ("glu", "down_proj.bias", (H,)),
    ],
)
def test_misshapen_tensors_are_named(name: str, key: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    make, load = LAYERS[name]
    path = saved(tmp_path / "model.safetensors", make(), **{f"{PREFIX}.{key}": torch.ones(shape)})
    with pytest.raises(RuntimeError, match="misshapen") as caught:
        load(path, PREFIX)
    assert key in str(caught.value) and str(list(shape)) in str(caught.value)


def test_a_gap_in_a_stack_is_missing(tmp_path: Path) -> None:
    layer = fusedmlp.FusedReLUMLP([D, D, D, D])
    tensors = {f"s.{k}": v for k, v in layer.state_dict().items() if not k.startswith("2.")}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"missing: 2\.weight; surplus: 4\.bias, 4\.weight"):
        fusedmlp.FusedReLUMLP.from_safetensors(tmp_path / "model.safetensors", "s")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        fusedmlp.FusedMLP.from_safetensors(tmp_path / "nothing.safetensors", "")
    codes = {f"{n}.weight": torch.zeros(4, 4, dtype=torch.int8) for n in ("fc1", "fc2")}
    save_file(codes, tmp_path / "int8.safetensors")
    for dtype in (None, torch.float32):
        with pytest.raises(ValueError, match=r"must be one of .*F32.*; got fc1\.weight I8"):
            fusedmlp.FusedMLP.from_safetensors(tmp_path / "int8.safetensors", "", dtype=dtype)
    mixed = {"fc1.weight": torch.zeros(4, 4), "fc2.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    save_file(mixed, tmp_path / "mixed.safetensors")
    with pytest.raises(ValueError, match="differ in dtype"):
        fusedmlp.FusedMLP.from_safetensors(tmp_path / "mixed.safetensors", "")
    made = fusedmlp.FusedMLP.from_safetensors(tmp_path / "mixed.safetensors", "", dtype=torch.float16)
    assert {p.dtype for p in made.parameters()} == {torch.float16}


def test_another_activation_is_refused_before_the_file_is_opened(tmp_path: Path) -> None:
    for cls, name in ((fusedmlp.FusedSwiGLUMLP, "gelu"), (fusedmlp.FusedGeGLUMLP, "silu")):
        with pytest.raises(ValueError, match=f"{cls.__name__} computes .*got activation"):
            cls.from_safetensors(tmp_path / "nothing", "", activation=name)


def test_the_module_needs_safetensors_only_when_called() -> None:
    assert "safetensors" not in vars(checkpoints)
