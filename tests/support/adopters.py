"""Modules that adopt a stateless layer: stand-ins as model code writes them, and classes of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from torch import Tensor, nn
from transformers import BertConfig, CLIPVisionConfig, GemmaConfig, LlamaConfig
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

import fusedmlp
from fusedmlp import layers

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}
ACTS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}


class Here:
    """A repository of kernels that lies in this process."""

    def __init__(self, name: str) -> None:
        self.layer_name = name

    def load(self) -> type[nn.Module]:
        return getattr(layers, self.layer_name)


def lend(name: str, model: nn.Module, mode: Mode = Mode.TRAINING, condition: Any = None) -> nn.Module:
    """``model`` kernelized; its class, and its children's, ask for the layer of that name."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            replace_kernel_forward_from_hub(type(module), name, condition)
    if isinstance(model, nn.Sequential):
        replace_kernel_forward_from_hub(nn.Sequential, name, condition)
    try:
        with use_kernel_mapping({name: {"cpu": Here(name)}}, inherit_mapping=False):
            return kernelize(model, mode=mode, device="cpu", use_fallback=False)
    finally:
        if isinstance(model, nn.Sequential):
            del nn.Sequential.kernel_layer_name, nn.Sequential.kernel_condition


class Gated(nn.Module):
    """A gated MLP as model code writes it."""

    def __init__(self, act: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(24, 40, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(40, 24, bias=bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Scaled(Gated):
    """The same with something more in the forward."""

    scale: Any = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Sliced(Gated):
    """As models with tensor-parallel checkpoints had it: an object of the module says what is computed."""

    def __init__(self, act: nn.Module, bias: bool = False) -> None:
        super().__init__(act, bias)
        self.config = LlamaConfig(**SIZES, pretraining_tp=2)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.pretraining_tp > 1:
            parts = [F.linear(x, w) for w in self.up_proj.weight.chunk(2)]
            return self.down_proj(self.act_fn(self.gate_proj(x)) * torch.cat(parts, -1))
        return super().forward(x)


class Switching(Gated):
    """Computes under another mode than its caller's."""

    mode: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return super().forward(x)


class OwnWeight(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Limited(nn.Module):
    """Reads an attribute that says what is computed."""

    limit: float | None = None  # of the class, until an instance sets its own

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(24, 40)

    def forward(self, input: Tensor) -> Tensor:
        y = F.relu(self.lin(input))
        return y if self.limit is None else y.clamp(max=self.limit)


class Helped(nn.Module):
    """Its forward calls a method, in the place of which an instance may have another function."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(24, 40)

    def act(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.lin(input))


class Functional(nn.Module):
    """Its activation is a function, kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(24, 40), nn.Linear(40, 24)
        self.act = F.silu

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(hidden_states)))


def gemma(act: str) -> nn.Module:
    return GemmaMLP(GemmaConfig(**SIZES, hidden_act=act, hidden_activation=act))


ADOPTERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "gemma": ("GeGLUMLP", lambda: gemma("gelu_pytorch_tanh")),
    "gemma, silu": ("GLUMLP", lambda: gemma("silu")),
    "llama": ("SwiGLUMLP", lambda: LlamaMLP(LlamaConfig(**SIZES))),
    "llama with biases": ("SwiGLUMLP", lambda: LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True))),
    "clip": ("MLP", lambda: CLIPMLP(CLIPVisionConfig(**SIZES))),
    "bert": ("LinearAct", lambda: BertIntermediate(BertConfig(**SIZES))),
    "sequential": ("LinearReLU", lambda: nn.Sequential(nn.Linear(24, 40), nn.ReLU())),
    "own weight": ("LinearReLU", lambda: OwnWeight(24, 40)),
    "own weight, no bias": ("LinearReLU", lambda: OwnWeight(24, 40, bias=False)),
    "attribute": ("LinearReLU", Limited),
    "function": ("MLP", Functional),
}


def fused_op(module: nn.Module, x: Tensor) -> bool:
    """Whether a call of ``module`` came to one of our operations, on its way to PyTorch's for want of a GPU."""
    notes = fusedmlp.explain_plan(module, x).notes
    return [note.reason for note in notes] == ["the tensors are on cpu; the kernels run on CUDA devices"]


def assert_equal_steps(ours: nn.Module, eager: nn.Module, x: Tensor) -> None:
    """Outputs and all gradients of two modules with the same parameters."""
    found, wanted = [], []
    for module, results in ((ours, found), (eager, wanted)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results += [y, *torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])]
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
