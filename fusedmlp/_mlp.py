"""The two-layer MLP: ``fc2(act(fc1(x)))``."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import Tensor, nn

from . import explain, functional, steady
from ._adopt import read_mlp
from ._children import first_reason, has_global_hooks, plain_parts
from ._load import CheckedLoad
from ._module_config import accepted, bias_flags, config_activation, config_bias, config_sizes, positive_size
from .activations import ACTIVATIONS, Activation

Mlp = TypeVar("Mlp", bound="FusedMLP")
_NAMES = ("fc1", "fc2")


class FusedMLP(CheckedLoad):
    """``fc2(act(fc1(x)))``.

    Args:
        hidden_size, intermediate_size: sizes, at least 1.
        out_features: output size; ``hidden_size`` where None.
        activation: one of ``fusedmlp.activations.ACTIVATIONS`` or a Hugging Face name of one.
        bias: one flag, or a pair for (fc1, fc2).
        recompute: keep only the input for the backward and compute the hidden activation again.
        device, dtype: as in ``nn.Linear``.

    Shape: x [..., hidden_size] -> [..., out_features].

    Raises:
        ValueError: a size is not positive, the activation is unknown, or ``bias`` has another length.
        TypeError: a size is no int.
    """

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        out_features: int | None = None,
        activation: str | Activation = "gelu",
        bias: bool | tuple[bool, ...] | list[bool] = True,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden_size = positive_size("hidden_size", hidden_size)
        intermediate_size = positive_size("intermediate_size", intermediate_size)
        out_features = hidden_size if out_features is None else positive_size("out_features", out_features)
        first, second = bias_flags(bias, _NAMES)
        name = accepted(type(self), activation, None)
        fc1 = nn.Linear(hidden_size, intermediate_size, bias=first, device=device, dtype=dtype)
        fc2 = nn.Linear(intermediate_size, out_features, bias=second, device=device, dtype=dtype)
        super().__init__()
        self._own(fc1, fc2, name, recompute)

    def _own(self, fc1: nn.Linear, fc2: nn.Linear, activation: str, recompute: bool) -> None:
        self.hidden_size, self.intermediate_size = fc1.in_features, fc1.out_features
        self.out_features = fc2.out_features
        self.activation = activation
        self.recompute = bool(recompute)
        self.fc1, self.fc2 = fc1, fc2

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> [..., out_features]; errors as ``functional.mlp``."""
        y = steady.served(("mlp", self.activation, self.recompute, False), self._modules, _NAMES, x)
        if y is not None:
            return y
        children = self._modules
        fc1, fc2 = plain_parts(children.get("fc1")), plain_parts(children.get("fc2"))
        if fc1 is not None and fc2 is not None and not has_global_hooks():
            return functional.mlp(x, fc1[0], fc2[0], fc1[1], fc2[1], self.activation, self.recompute)
        if not torch.compiler.is_compiling():
            explain.note_eager("mlp", first_reason(_NAMES, children))
        return self.fc2(ACTIVATIONS[self.activation].fn(self.fc1(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation}, recompute={self.recompute}"

    @classmethod
    def from_module(
        cls: type[Mlp], eager: nn.Module, activation: str | Activation | None = None, recompute: bool = False
    ) -> Mlp:
        """A fused MLP over the very Linears of ``eager``: no copy, optimisers built earlier keep working.

        Args:
            eager: a module that computes ``fc2(act(fc1(x)))``, or ``nn.Sequential(Linear, act, Linear)``
                (whose parameters then are named fc1 and fc2).
            activation: needed only where the module's own is not recognised.
            recompute: as in the constructor.

        Raises:
            TypeError, ValueError: ``eager`` computes anything else; the message says what.
        """
        fc1, fc2, act = read_mlp(eager, activation)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.training = eager.training  # its children keep their own flags
        FusedMLP._own(made, fc1, fc2, accepted(cls, act, None), recompute)
        return made

    @classmethod
    def from_config(
        cls: type[Mlp],
        config: object,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool | tuple[bool, ...] | list[bool] | None = None,
        recompute: bool = False,
    ) -> Mlp:
        """Sizes and activation of a Hugging Face config; biases on, unless it or ``bias`` says otherwise.

        Raises:
            TypeError: a field is missing.
            ValueError: a size or the activation is not supported.
        """
        hidden, intermediate = config_sizes(config)
        flags = bias_flags(config_bias(config, True, bias), _NAMES)
        act = config_activation(config)
        return cls(hidden, intermediate, None, act, flags, recompute, device, dtype)

    @classmethod
    def from_safetensors(
        cls: type[Mlp],
        path: str | os.PathLike[str],
        prefix: str,
        activation: str | Activation = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
    ) -> Mlp:
        """``<prefix>.fc1.*`` and ``<prefix>.fc2.*`` of a safetensors file, reading nothing else.

        Raises:
            RuntimeError: a tensor is missing, surplus or misshapen under the prefix; the message lists them.
        """
        from .integrations.checkpoints import build_from_file

        def make(shapes: dict[str, tuple[int, ...]]) -> Mlp:
            (inner, hidden), (out, _) = shapes["fc1.weight"], shapes["fc2.weight"]
            flags = tuple(f"{n}.bias" in shapes for n in _NAMES)
            return cls(hidden, inner, out, activation, flags, recompute, "meta")

        return build_from_file(path, prefix, _NAMES, make, device, dtype)
