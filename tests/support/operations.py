"""The operations under test: their tensors, their plain PyTorch meaning (the oracle), and the fused call.

The oracle is written here from nn.functional alone, so that an error in fusedmlp.reference cannot hide
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmlp.functional as fused

Tensors = dict[str, Tensor | None]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Operation:
    """One functional: `projections` maps widths to weight shapes; the calls take (tensors, activation)."""

    name: str
    widths: tuple[str, ...]
    projections: Callable[..., dict[str, tuple[int, int]]]
    plain: Callable[[Tensors, str], Tensor]
    fused: Callable[..., Tensor]
    hidden: Callable[..., tuple[int, ...]]
    options: tuple[str, ...] = ("recompute",)

    @property
    def savings(self) -> list[dict[str, bool]]:
        """Every way to say what is kept for backward: the default, and each option by itself."""
        return [{}, *({name: True} for name in self.options)]

    def shapes(self, widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each weight ("<projection>_weight") and bias ("<projection>_bias")."""
        shapes: dict[str, tuple[int, ...]] = {}
        for projection, shape in self.projections(*widths).items():
            shapes[f"{projection}_weight"] = shape
            shapes[f"{projection}_bias"] = shape[:1]
        return shapes


def _plain_linear_act(t: Tensors, act: str) -> Tensor:
    return ACTIVATIONS[act](F.linear(t["x"], t["fc_weight"], t["fc_bias"]))


def _fused_linear_act(t: Tensors, act: str) -> Tensor:
    return fused.linear_act(t["x"], t["fc_weight"], t["fc_bias"], activation=act)


def _plain_glu(t: Tensors, act: str) -> Tensor:
    gate = F.linear(t["x"], t["gate_weight"], t["gate_bias"])
    up = F.linear(t["x"], t["up_weight"], t["up_bias"])
    return F.linear(ACTIVATIONS[act](gate) * up, t["down_weight"], t["down_bias"])


def _fused_glu(t: Tensors, act: str, **options: bool) -> Tensor:
    return fused.glu_mlp(
        t["x"],
        *(t[f"{name}_weight"] for name in ("gate", "up", "down")),
        *(t[f"{name}_bias"] for name in ("gate", "up", "down")),
        activation=act,
        **options,
    )


def _plain_mlp(t: Tensors, act: str) -> Tensor:
    hidden = ACTIVATIONS[act](F.linear(t["x"], t["fc1_weight"], t["fc1_bias"]))
    return F.linear(hidden, t["fc2_weight"], t["fc2_bias"])


def _fused_mlp(t: Tensors, act: str, recompute: bool = False) -> Tensor:
    return fused.mlp(
        t["x"],
        t["fc1_weight"],
        t["fc2_weight"],
        t["fc1_bias"],
        t["fc2_bias"],
        activation=act,
        recompute=recompute,
    )


def _layers(t: Tensors) -> list[tuple[Tensor | None, Tensor | None]]:
    count = sum(name.endswith("_weight") for name in t)
    return [(t[f"layer{i}_weight"], t[f"layer{i}_bias"]) for i in range(count)]


def _plain_relu_mlp(t: Tensors, act: str) -> Tensor:
    y = t["x"]
    for weight, bias in _layers(t):
        y = F.relu(F.linear(y, weight, bias))
    return y


def _fused_relu_mlp(t: Tensors, act: str) -> Tensor:
    weights, biases = zip(*_layers(t), strict=True)
    return fused.relu_mlp(t["x"], weights, biases)


OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in (
        Operation(
            "linear_act",
            ("K", "N"),
            lambda K, N: {"fc": (N, K)},
            _plain_linear_act,
            _fused_linear_act,
            hidden=lambda K, N: (N,),
            options=(),
        ),
        Operation(
            "glu_mlp",
            ("D", "H", "D_out"),
            lambda D, H, D_out: {"gate": (H, D), "up": (H, D), "down": (D_out, H)},
            _plain_glu,
            _fused_glu,
            hidden=lambda D, H, D_out: (H, D_out),
            options=("recompute", "keep_activation"),
        ),
        Operation(
            "mlp",
            ("D", "H", "D_out"),
            lambda D, H, D_out: {"fc1": (H, D), "fc2": (D_out, H)},
            _plain_mlp,
            _fused_mlp,
            hidden=lambda D, H, D_out: (H, D_out),
        ),
        Operation(
            "relu_mlp",
            ("D0", "D1", "D2", "D3"),
            lambda *w: {f"layer{i}": (w[i + 1], w[i]) for i in range(len(w) - 1)},
            _plain_relu_mlp,
            _fused_relu_mlp,
            hidden=lambda *w: w[1:],
            options=(),
        ),
    )
}

# Every operation with every way to say what is kept for backward.
WAYS = {"-".join([name, *saving]): (name, saving) for name, op in OPERATIONS.items() for saving in op.savings}
