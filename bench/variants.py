"""What is compared: the eager modules, and each variant of them with the package that it needs.

A peer is called the way its own documentation says. It computes on the very weights of the eager module, except
quack, whose first layer has gate and up rows interleaved: it gets a copy.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusedmlp import FusedGLUMLP, FusedMLP

# What one process tuned, another one finds on disk: see rehearsal.py. quack reads this when it is imported.
os.environ.setdefault("QUACK_CACHE_AUTOTUNING", "1")

GATED = ("geglu", "swiglu")


@dataclass(frozen=True)
class Op:
    """One operation: its weight matrices of hidden x intermediate (for the work to do), and whether it has biases."""

    matrices: int
    bias: bool


OPS = {"geglu": Op(3, False), "swiglu": Op(3, False), "mlp_relu": Op(2, True)}


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)); x [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden: int, intermediate: int, act: nn.Module, **options: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **options)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **options)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **options)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class TwoLayer(nn.Module):
    """fc2(relu(fc1(x))) with biases; x [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden: int, intermediate: int, **options: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate, **options)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(intermediate, hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def eager_module(op: str, hidden: int, intermediate: int, **options: Any) -> nn.Module:
    if op == "mlp_relu":
        return TwoLayer(hidden, intermediate, **options)
    act = nn.GELU(approximate="tanh") if op == "geglu" else nn.SiLU()
    return Gated(hidden, intermediate, act, **options)


@dataclass
class Built:
    """A variant of one eager module. gradients: those of the eager module's parameters, in its order."""

    module: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    gradients: Callable[[], list[Tensor | None]]


def _shared(module: Callable[[Tensor], Tensor], eager: nn.Module) -> Built:
    parameters = list(eager.parameters())
    return Built(module, parameters, lambda: [p.grad for p in parameters])


def _eager(op: str, eager: nn.Module) -> Built:
    return _shared(eager, eager)


def _compile(op: str, eager: nn.Module) -> Built:
    # Kernels for the very shape, also where other token counts came before.
    return _shared(torch.compile(eager, dynamic=False), eager)


def _compile_dynamic(op: str, eager: nn.Module) -> Built:
    return _shared(torch.compile(eager, dynamic=True), eager)


def _compile_max(op: str, eager: nn.Module) -> Built:
    return _shared(torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False), eager)


def _fused(op: str, eager: nn.Module) -> Built:
    kind = FusedMLP if op == "mlp_relu" else FusedGLUMLP
    return _shared(kind.from_module(eager), eager)


def _fused_keep(op: str, eager: nn.Module) -> Built:
    return _shared(FusedGLUMLP.from_module(eager, keep_activation=True), eager)


def _adopt(module: nn.Module, eager: nn.Module) -> Built:
    """The module of a peer with the Linears of ours, which have the same names."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(module, name, getattr(eager, name))
    return _shared(module, eager)


def _liger(op: str, eager: nn.Module) -> Built:
    name, file, act = ("LigerGEGLUMLP", "geglu", "gelu_pytorch_tanh")
    if op == "swiglu":
        name, file, act = ("LigerSwiGLUMLP", "swiglu", "silu")
    kind = getattr(importlib.import_module(f"liger_kernel.transformers.{file}"), name)
    intermediate, hidden = eager.up_proj.weight.shape
    with torch.device("meta"):  # its own weights are not used
        module = kind(SimpleNamespace(hidden_size=hidden, intermediate_size=intermediate, hidden_act=act))
    return _adopt(module, eager)


def _flash_swiglu(op: str, eager: nn.Module) -> Built:
    from flash_swiglu_mlp import FlashSwiGLUMLP

    intermediate, hidden = eager.up_proj.weight.shape
    return _adopt(FlashSwiGLUMLP(hidden, intermediate, device="meta"), eager)


def _quack(op: str, eager: nn.Module, tuned: bool = True) -> Built:
    from quack import mlp

    if op == "mlp_relu":
        fc1, fc2 = eager.fc1, eager.fc2

        # quack's module trains in plain PyTorch where there are biases; its function does not.
        def biased(x: Tensor) -> Tensor:
            return mlp.mlp_func(x, fc1.weight, fc2.weight, "relu", bias1=fc1.bias, bias2=fc2.bias, tuned=tuned)

        return _shared(biased, eager)
    gate, up = eager.gate_proj.weight, eager.up_proj.weight
    intermediate, hidden = up.shape
    module = mlp.MLP(hidden, intermediate, hidden, activation=op, device="meta", tuned=tuned)
    first = nn.Parameter(torch.stack([gate.detach(), up.detach()], dim=1).reshape(2 * intermediate, hidden))
    module.fc1.weight, module.fc2.weight = first, eager.down_proj.weight

    def gradients() -> list[Tensor | None]:
        rows = None if first.grad is None else first.grad.view(intermediate, 2, hidden)
        apart = (None, None) if rows is None else (rows[:, 0], rows[:, 1])
        return [*apart, eager.down_proj.weight.grad]

    return Built(module, [first, eager.down_proj.weight], gradients)


def _quack_untuned(op: str, eager: nn.Module) -> Built:
    return _quack(op, eager, tuned=False)


@dataclass(frozen=True)
class Variant:
    """How to make a variant.

    needs: (module to import, package to install). rehearse: whether its first call may take minutes or end badly, so
    that another process tries it first. instead: the variant that takes its place where it does not get ready in
    time. batched: it takes x [1, tokens, hidden] only.
    """

    build: Callable[[str, nn.Module], Built]
    ops: tuple[str, ...] = tuple(OPS)
    needs: tuple[str, str] | None = None
    rehearse: bool = False
    instead: str | None = None
    batched: bool = False


QUACK = ("quack.mlp", "quack-kernels")
VARIANTS = {
    "eager": Variant(_eager),
    "compile": Variant(_compile),
    "compile_dynamic": Variant(_compile_dynamic),  # one set of kernels for all token counts but 1
    "compile_max": Variant(_compile_max, rehearse=True),
    "liger": Variant(_liger, GATED, ("liger_kernel.transformers.geglu", "liger-kernel"), True),
    "quack": Variant(_quack, needs=QUACK, rehearse=True, instead="quack_untuned"),
    "quack_untuned": Variant(_quack_untuned, needs=QUACK, rehearse=True),
    "flash_swiglu": Variant(
        _flash_swiglu, ("swiglu",), ("flash_swiglu_mlp", "flash-swiglu-mlp"), rehearse=True, batched=True
    ),
    "fused": Variant(_fused),
    "fused_keep": Variant(_fused_keep, GATED),
}
DEFAULT = tuple(v for v in VARIANTS if v not in ("quack_untuned", "compile_dynamic", "fused_keep"))


def missing(name: str) -> str | None:
    """Why a variant cannot run here; None where it can."""
    needs = VARIANTS[name].needs
    if needs is None:
        return None
    module, package = needs
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] == error.name.split(".")[0]:
            return f"{package} is not installed"
        return f"{package} is installed, but needs {error.name}, which is not"
    except Exception as error:  # a peer may raise anything where it does not like the machine
        return f"{package} is installed, but importing it raises {type(error).__name__}: {error}"
    return None


def not_offered(name: str, op: str) -> str | None:
    """Why a variant has nothing for an operation; None where it has."""
    ops = VARIANTS[name].ops
    return None if op in ops else f"has {' and '.join(ops)} only, not {op}"
