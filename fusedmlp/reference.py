"""The plain PyTorch meaning of every operation: the oracle of the tests, and the path without a GPU.

Shapes and dtypes are those of :mod:`fusedmlp.functional`. The ``*_grads`` functions are the same backward passes
written out, for operators whose bodies run below autograd: x and gy as matrices, gradients in the order x, weights,
biases, every one of them (None for a bias that is None).
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
    for weight, bias in zip(weights, biases):
        x = linear_act(x, weight, bias, "relu")
    return x


Grads = tuple[Tensor | None, ...]


def _linear_grads(gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return gy @ weight, gy.t() @ x, None if bias is None else gy.sum(0)


def linear_act_grads(
    gy: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: Activation
) -> Grads:
    dpre = act.grad(gy, F.linear(x, weights[0], biases[0]))
    return _linear_grads(dpre, x, weights[0], biases[0])


def glu_mlp_grads(
    gy: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: Activation
) -> Grads:
    gate, up = F.linear(x, weights[0], biases[0]), F.linear(x, weights[1], biases[1])
    a = act.fn(gate)
    dh, dwd, dbd = _linear_grads(gy, a * up, weights[2], biases[2])
    dx_gate, dwg, dbg = _linear_grads(act.grad(dh * up, gate), x, weights[0], biases[0])
    dx_up, dwu, dbu = _linear_grads(dh * a, x, weights[1], biases[1])
    return dx_gate + dx_up, dwg, dwu, dwd, dbg, dbu, dbd


def mlp_grads(
    gy: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: Activation
) -> Grads:
    pre = F.linear(x, weights[0], biases[0])
    da, dw2, db2 = _linear_grads(gy, act.fn(pre), weights[1], biases[1])
    dx, dw1, db1 = _linear_grads(act.grad(da, pre), x, weights[0], biases[0])
    return dx, dw1, dw2, db1, db2


def relu_mlp_grads(
    gy: Tensor, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], act: Activation
) -> Grads:
    inputs = [x]
    for weight, bias in zip(weights, biases):
        inputs.append(linear_act(inputs[-1], weight, bias, act))
    layers = list(zip(inputs, inputs[1:], weights, biases))
    dweights: list[Tensor] = []
    dbiases: list[Tensor | None] = []
    for below, y, weight, bias in reversed(layers):
        gy, dw, db = _linear_grads(act.grad(gy, y), below, weight, bias)  # of ReLUs, the output has the input's sign
        dweights.insert(0, dw)
        dbiases.insert(0, db)
    return gy, *dweights, *dbiases
