"""Training steps of models that are not ours, with random weights: what `explain` must read unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Step = Callable[[], Any]


def _train(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    loss: Callable[[Any], torch.Tensor],
    autocast: torch.dtype | None = None,
    run: Callable[..., Any] | None = None,
) -> Step:
    """Forward, loss, backward and AdamW. run: the model's compiled form, where it is one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    device = next(model.parameters()).device.type
    call = model if run is None else run  # a compiled module has no truth value

    def step() -> None:
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            value = loss(call(**inputs))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ids(vocabulary: int, batch: int, length: int, device: str) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device=device)


def vit(device: str) -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4} if device == "cpu" else {}
    config = ViTConfig(num_hidden_layers=3, num_labels=10, **small)
    model = ViTForImageClassification(config).to(device, torch.bfloat16)
    pixels = torch.randn(2 if device == "cpu" else 32, 3, 224, 224, device=device, dtype=torch.bfloat16)
    return _train(model, {"pixel_values": pixels}, lambda y: y.logits.float().square().mean())


def _llama(device: str, layers: int) -> tuple[nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaModel

    width = 64 if device == "cpu" else 1024
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaModel(config).to(device, torch.bfloat16)
    return model, _ids(1000, 2 if device == "cpu" else 8, 16 if device == "cpu" else 512, device)


def llama(device: str) -> Step:
    model, ids = _llama(device, 2)
    return _train(model, {"input_ids": ids}, lambda y: y.last_hidden_state.float().square().mean())


def resnet(device: str) -> Step:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[1, 1, 1, 1], num_labels=10)
    model = ResNetForImageClassification(config).to(device)
    pixels = torch.randn(2 if device == "cpu" else 32, 3, 224, 224, device=device)
    return _train(model, {"pixel_values": pixels}, lambda y: y.logits.square().mean())


def gpt2_autocast(device: str) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    width = 64 if device == "cpu" else 768
    config = GPT2Config(
        vocab_size=1000, n_layer=2, n_embd=width, n_head=width // 64 if width > 64 else 4, use_cache=False
    )
    model = GPT2LMHeadModel(config).to(device)
    ids = _ids(1000, 2 if device == "cpu" else 8, 16 if device == "cpu" else 512, device)
    return _train(model, {"input_ids": ids, "labels": ids}, lambda y: y.loss, autocast=torch.bfloat16)


def bert_compile(device: str) -> Step:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4} if device == "cpu" else {}
    config = BertConfig(vocab_size=1000, num_hidden_layers=2, **small)
    model = BertModel(config, add_pooling_layer=False).to(device, torch.bfloat16)
    ids = _ids(1000, 2 if device == "cpu" else 16, 16 if device == "cpu" else 256, device)
    mask = torch.ones_like(ids)
    run = torch.compile(model)
    inputs = {"input_ids": ids, "attention_mask": mask}
    return _train(model, inputs, lambda y: y.last_hidden_state.float().square().mean(), run=run)


def llama_compile(device: str) -> Step:
    """The forward alone, with CUDA graphs by Inductor."""
    model, ids = _llama(device, 1)
    run = torch.compile(model, mode="reduce-overhead" if device == "cuda" else None)

    def step() -> None:
        with torch.no_grad():
            run(input_ids=ids)

    return step


MODELS: dict[str, Callable[[str], Step]] = {
    "vit-step": vit,
    "llama-step": llama,
    "resnet-step": resnet,
    "gpt2-autocast-step": gpt2_autocast,
    "bert-compile-step": bert_compile,
    "llama-compile-graphs-forward": llama_compile,
}
