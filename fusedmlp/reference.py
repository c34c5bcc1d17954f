"""The plain PyTorch meaning of every operation: the oracle of the tests, and the path without a GPU.

Shapes and dtypes are those of :mod:`fusedmlp.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .activations import Activation, resolve_activation


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | Activation = "relu") -> Tensor:
    """``act(x W^T + b)``."""
    return resolve_activation(activation).fn(F.linear(x, weight, bias))


def glu_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | Activation = "silu",
) -> Tensor:
    """``(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd``."""
    act = resolve_activation(activation).fn
    hidden = act(F.linear(x, gate_weight, gate_bias)) * F.linear(x, up_weight, up_bias)
    return F.linear(hidden, down_weight, down_bias)


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
    activation: str | Activation = "gelu",
) -> Tensor:
    """``act(x W1^T + b1) W2^T + b2``."""
    hidden = linear_act(x, fc1_weight, fc1_bias, activation)
    return F.linear(hidden, fc2_weight, fc2_bias)


def relu_mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """A stack of Linear and ReLU, the last layer activated too."""
    for weight, bias in zip(weights, biases, strict=True):
        x = linear_act(x, weight, bias, "relu")
    return x
