"""What ``get_kernel(...).layers`` offers: stateless layers for ``kernels.kernelize()``, and layers with weights.

A stateless layer lends its forward to a module of another class, the adopter. That module's class goes on saying what
is computed: its forward is read once, and where it is not what the layer computes (another activation, a norm or a
dropout in between, a scale), or a Linear is no plain one (an adapter, a hook, quantised), the class's own forward runs.
``fusedmlp.explain_plan(module, x)`` says which and why. Biases may be there or not; names of children do not matter.

There is no ``...Layout`` beside any of them: the kernels read gate and up through one descriptor where they are, so
that packing the two weights into one would save nothing, and would change the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ._stateless import adopted, suits
from .modules import (
    FusedGeGLUMLP,
    FusedGLUMLP,
    FusedLinearAct,
    FusedLinearReLU,
    FusedMLP,
    FusedReLUMLP,
    FusedSwiGLUMLP,
)

__all__ = [
    "GLUMLP",
    "MLP",
    "FusedGLUMLP",
    "FusedGeGLUMLP",
    "FusedLinearAct",
    "FusedLinearReLU",
    "FusedMLP",
    "FusedReLUMLP",
    "FusedSwiGLUMLP",
    "GeGLUMLP",
    "LinearAct",
    "LinearReLU",
    "SwiGLUMLP",
    "condition",
]

_GELU = ("gelu_tanh", "gelu")


class GLUMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` with any known activation, for adopters such as ``LlamaMLP`` or ``GemmaMLP``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D_out]."""
        return adopted("glu_mlp", GLUMLP, self, x, ())


class GeGLUMLP(nn.Module):
    """:class:`GLUMLP` for adopters whose activation is GELU, in the tanh or the erf form: each gets its own."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D_out]."""
        return adopted("glu_mlp", GeGLUMLP, self, x, _GELU)


class SwiGLUMLP(nn.Module):
    """:class:`GLUMLP` for adopters whose activation is SiLU."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D_out]."""
        return adopted("glu_mlp", SwiGLUMLP, self, x, ("silu",))


class MLP(nn.Module):
    """``fc2(act(fc1(x)))`` with any known activation, for adopters such as ``CLIPMLP`` or ``SiglipMLP``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., D] -> [..., D_out]."""
        return adopted("mlp", MLP, self, hidden_states, ())


class LinearAct(nn.Module):
    """``act(linear(x))`` with any known activation: ``BertIntermediate``, or a module with a weight of its own."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., K] -> [..., N]."""
        return adopted("linear_act", LinearAct, self, hidden_states, ())


class LinearReLU(nn.Module):
    """``relu(linear(x))``: ``nn.Sequential(Linear, ReLU)``, or a module with a weight of its own."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]."""
        return adopted("linear_act", LinearReLU, self, input, ("relu",))


_COMPUTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "GLUMLP": ("glu_mlp", ()),
    "GeGLUMLP": ("glu_mlp", _GELU),
    "SwiGLUMLP": ("glu_mlp", ("silu",)),
    "MLP": ("mlp", ()),
    "LinearAct": ("linear_act", ()),
    "LinearReLU": ("linear_act", ("relu",)),
}


def condition(layer_name: str) -> Callable[[nn.Module], bool]:
    """The ``condition=`` of ``kernels.use_kernel_forward_from_hub`` and ``replace_kernel_forward_from_hub`` for one of
    the stateless layers: whether a module computes what that layer does, so that it adopts it.

    Without it nothing goes wrong: the layer looks at its adopter itself. With it, ``kernelize()`` leaves a module that
    the layer does not suit as it is.

    Raises:
        ValueError: no stateless layer has that name.
    """
    if layer_name not in _COMPUTES:
        raise ValueError(f"no stateless layer is called {layer_name!r}; there are: {', '.join(_COMPUTES)}")
    op, allowed = _COMPUTES[layer_name]
    return lambda module: suits(op, module, allowed)
