"""The activations that the kernels know: one table from a name to its meaning.

The Triton side of the same table is :mod:`fusedmlp.kernels.activations`, selected by ``Activation.name``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        name: our name, which selects the Triton function.
        fn: the same function in plain PyTorch, elementwise, differentiable.
        grad: ``(grad, x) -> grad * act'(x)`` in plain PyTorch, for where autograd cannot be used.
        hf_names: every name by which Hugging Face configs mean this function (``ACT2FN``).
        saves: what the derivative is computed from: ``"output"`` (the activated value suffices) or ``"input"``.
    """

    name: str
    fn: Callable[[Tensor], Tensor]
    grad: Callable[[Tensor, Tensor], Tensor]
    hf_names: tuple[str, ...]
    saves: str

    def __reduce__(self) -> tuple[Callable[[str], Activation], tuple[str]]:
        return resolve_activation, (self.name,)


def relu2(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    return x


aten = torch.ops.aten


def _relu_grad(grad: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(grad, x, 0)  # type: ignore[no-any-return]


def _relu2_grad(grad: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(grad * (2 * F.relu(x)), x, 0)  # type: ignore[no-any-return]


def _gelu_grad(grad: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(grad, x)  # type: ignore[no-any-return]


def _gelu_tanh_grad(grad: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]


def _silu_grad(grad: Tensor, x: Tensor) -> Tensor:
    return aten.silu_backward(grad, x)  # type: ignore[no-any-return]


def _quick_gelu_grad(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return grad * s + aten.sigmoid_backward(grad * x, s) * 1.702  # type: ignore[no-any-return]


def _sigmoid_grad(grad: Tensor, x: Tensor) -> Tensor:
    return aten.sigmoid_backward(grad, torch.sigmoid(x))  # type: ignore[no-any-return]


def _identity_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad


_GELU_TANH_NAMES = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("relu", F.relu, _relu_grad, ("relu",), "output"),
        Activation("relu2", relu2, _relu2_grad, ("relu2",), "input"),
        Activation("gelu", F.gelu, _gelu_grad, ("gelu", "gelu_python"), "input"),
        Activation("gelu_tanh", gelu_tanh, _gelu_tanh_grad, _GELU_TANH_NAMES, "input"),
        Activation("silu", F.silu, _silu_grad, ("silu", "swish"), "input"),
        Activation("quick_gelu", quick_gelu, _quick_gelu_grad, ("quick_gelu",), "input"),
        Activation("sigmoid", torch.sigmoid, _sigmoid_grad, ("sigmoid",), "output"),
        Activation("identity", identity, _identity_grad, ("linear", "identity"), "output"),
    )
}

_BY_NAME: dict[str, Activation] = {n: a for a in ACTIVATIONS.values() for n in (a.name, *a.hf_names)}

# Hugging Face's activation modules, by class name: the package need not be installed to recognise them.
_HF_CLASSES: dict[str, str] = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
    "ReLUSquaredActivation": "relu2",
    "LinearActivation": "identity",
}


def activation_names() -> list[str]:
    """Every accepted name, sorted."""
    return sorted(_BY_NAME)


def resolve_activation(name: str | Activation) -> Activation:
    """The activation of that name, ours or Hugging Face's.

    Raises:
        ValueError: the name is not one of :func:`activation_names`; the message lists them.
        TypeError: ``name`` is neither a string nor an :class:`Activation`.
    """
    if isinstance(name, Activation):
        return name
    if not isinstance(name, str):
        raise TypeError(f"activation must be a name (str), got {type(name).__name__}: {name!r}")
    found = _BY_NAME.get(name)
    if found is None:
        raise ValueError(f"unknown activation {name!r}; the known ones are: {', '.join(activation_names())}")
    return found


_FUNCTIONS: dict[object, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
}


def activation_of_module(act: object) -> Activation | None:
    """The activation that a module or function computes, decided by its exact class; None where it is not known.

    A subclass may override ``forward``, so that only exact classes count.
    """
    kind = type(act)
    if kind is nn.GELU:
        return ACTIVATIONS["gelu_tanh" if act.approximate == "tanh" else "gelu"]  # type: ignore[attr-defined]
    plain = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Sigmoid: "sigmoid", nn.Identity: "identity"}
    if kind in plain:
        return ACTIVATIONS[plain[kind]]
    if isinstance(act, Activation):
        return act
    try:
        if act in _FUNCTIONS:
            return ACTIVATIONS[_FUNCTIONS[act]]
    except TypeError:  # unhashable: no function of ours
        return None
    module = kind.__module__ or ""
    if module.startswith("transformers.") and kind.__name__ in _HF_CLASSES:
        return ACTIVATIONS[_HF_CLASSES[kind.__name__]]
    return None
