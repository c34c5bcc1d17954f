"""The gated MLPs: ``down_proj(act(gate_proj(x)) * up_proj(x))``."""

from __future__ import annotations

import os
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from . import explain, functional, saving, steady
from ._adopt import read_glu
from ._children import first_reason, has_global_hooks, plain_parts
from ._load import CheckedLoad
from ._module_config import accepted, bias_flags, config_activation, config_bias, config_sizes, positive_size
from .activations import ACTIVATIONS, Activation

Glu = TypeVar("Glu", bound="FusedGLUMLP")
_NAMES = ("gate_proj", "up_proj", "down_proj")
_GELU_FORMS = {"tanh": "gelu_tanh", "none": "gelu"}


class FusedGLUMLP(CheckedLoad):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``.

    Args:
        hidden_size, intermediate_size: sizes, at least 1.
        activation: one of ``fusedmlp.activations.ACTIVATIONS`` or a Hugging Face name of one.
        bias: one flag, or three for (gate_proj, up_proj, down_proj).
        out_features: output size; ``hidden_size`` where None.
        recompute: keep only the input for the backward and compute gate and up again.
        device, dtype: as in ``nn.Linear``.
        keep_activation: for a faster backward keep ``act(gate) * up`` too, which it makes and stores again otherwise:
            3 ``intermediate_size`` values a token beside the input instead of 2. It saves about 2 % of a training step
            at ``hidden_size`` 768, less where that is larger, and nothing where down_proj's weight is frozen.

    Shape: x [..., hidden_size] -> [..., out_features].

    Raises:
        ValueError: a size is not positive, the activation is unknown, ``bias`` has another length, or both
            ``recompute`` and ``keep_activation`` are set.
        TypeError: a size is no int.
    """

    _allowed: ClassVar[tuple[str, ...] | None] = None
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str | Activation = "silu",
        bias: bool | tuple[bool, ...] | list[bool] = False,
        out_features: int | None = None,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        keep_activation: bool = False,
    ) -> None:
        hidden_size = positive_size("hidden_size", hidden_size)
        intermediate_size = positive_size("intermediate_size", intermediate_size)
        out_features = hidden_size if out_features is None else positive_size("out_features", out_features)
        gate, up, down = bias_flags(bias, _NAMES)
        name = accepted(type(self), activation, self._allowed)
        linears = {
            "gate_proj": nn.Linear(hidden_size, intermediate_size, bias=gate, device=device, dtype=dtype),
            "up_proj": nn.Linear(hidden_size, intermediate_size, bias=up, device=device, dtype=dtype),
            "down_proj": nn.Linear(intermediate_size, out_features, bias=down, device=device, dtype=dtype),
        }
        super().__init__()
        self._own(linears, name, recompute, keep_activation)

    def _own(self, linears: dict[str, nn.Linear], activation: str, recompute: bool, keep_activation: bool) -> None:
        saving.level(recompute, keep_activation)  # may refuse the two together
        self.hidden_size = linears["gate_proj"].in_features
        self.intermediate_size = linears["gate_proj"].out_features
        self.out_features = linears["down_proj"].out_features
        self.activation = activation
        self.recompute, self.keep_activation = bool(recompute), bool(keep_activation)
        for name in _NAMES:
            self.add_module(name, linears[name])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> [..., out_features]; errors as ``functional.glu_mlp``."""
        options = ("glu_mlp", self.activation, self.recompute, self.keep_activation)
        y = steady.served(options, self._modules, _NAMES, x)
        if y is not None:
            return y
        children = self._modules
        gate = plain_parts(children.get("gate_proj"))
        up = plain_parts(children.get("up_proj"))
        down = plain_parts(children.get("down_proj"))
        if gate is not None and up is not None and down is not None and not has_global_hooks():
            weights = gate[0], up[0], down[0], gate[1], up[1], down[1]
            return functional.glu_mlp(x, *weights, self.activation, self.recompute, self.keep_activation)
        if not torch.compiler.is_compiling():
            explain.note_eager("glu_mlp", first_reason(_NAMES, children))
        return self.down_proj(ACTIVATIONS[self.activation].fn(self.gate_proj(x)) * self.up_proj(x))

    def extra_repr(self) -> str:
        options = f"recompute={self.recompute}, keep_activation={self.keep_activation}"
        return f"activation={self.activation}, {options}"

    @classmethod
    def from_module(
        cls: type[Glu],
        eager: nn.Module,
        activation: str | Activation | None = None,
        recompute: bool = False,
        *,
        keep_activation: bool = False,
    ) -> Glu:
        """A fused MLP over the very Linears of ``eager``: no copy, optimisers built earlier keep working.

        Args:
            eager: a module that computes ``down_proj(act(gate_proj(x)) * up_proj(x))``, such as ``LlamaMLP``.
            activation: needed only where the module's own is not recognised.
            recompute, keep_activation: as in the constructor.

        Raises:
            TypeError, ValueError: ``eager`` computes anything else; the message says what. ValueError: both
                ``recompute`` and ``keep_activation`` are set.
        """
        linears, act = read_glu(eager, activation)
        name = accepted(cls, act, cls._allowed)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.training = eager.training  # its children keep their own flags
        FusedGLUMLP._own(made, linears, name, recompute, keep_activation)
        return made

    @classmethod
    def from_config(
        cls: type[Glu],
        config: object,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool | tuple[bool, ...] | list[bool] | None = None,
        recompute: bool = False,
        keep_activation: bool = False,
    ) -> Glu:
        """Sizes, activation and ``mlp_bias`` (else ``bias``, else none) of a Hugging Face config.

        Raises:
            TypeError: a field is missing.
            ValueError: a size or the activation is not supported, or not this class's.
        """
        hidden, intermediate = config_sizes(config)
        act = accepted(cls, config_activation(config), cls._allowed)
        flags = bias_flags(config_bias(config, False, bias), _NAMES)
        options = recompute, keep_activation
        return cls._make(hidden, intermediate, act, flags, None, options, device, dtype)

    @classmethod
    def from_safetensors(
        cls: type[Glu],
        path: str | os.PathLike[str],
        prefix: str,
        activation: str | Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        keep_activation: bool = False,
    ) -> Glu:
        """``<prefix>.gate_proj.*``, ``up_proj.*``, ``down_proj.*`` of a safetensors file, and no more.

        Args:
            path: the file.
            prefix: what stands before the names, such as ``model.layers.0.mlp``.
            activation: the file does not say it; None means silu, or the first that this class computes.
            device, dtype: where to put the tensors and as what; as in the file where None.
            recompute, keep_activation: as in the constructor.

        Raises:
            RuntimeError: a tensor is missing, surplus or misshapen under the prefix; the message lists them.
        """
        from .integrations.checkpoints import build_from_file

        default = "silu" if cls._allowed is None else cls._allowed[0]
        act = accepted(cls, default if activation is None else activation, cls._allowed)

        def make(shapes: dict[str, tuple[int, ...]]) -> Glu:
            inner, hidden = shapes["gate_proj.weight"]
            flags = tuple(f"{n}.bias" in shapes for n in _NAMES)
            options = recompute, keep_activation
            return cls._make(hidden, inner, act, flags, shapes["down_proj.weight"][0], options, "meta", None)

        return build_from_file(path, prefix, _NAMES, make, device, dtype)

    @classmethod
    def _make(
        cls: type[Glu],
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: tuple[bool, ...],
        out_features: int | None,
        options: tuple[bool, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> Glu:
        """The general constructor, whatever the arguments of the subclass's own; ``options``: recompute and
        keep_activation."""
        made = cls.__new__(cls)
        recompute, keep = options
        given = hidden_size, intermediate_size, activation, bias, out_features, recompute, device, dtype
        FusedGLUMLP.__init__(made, *given, keep_activation=keep)
        return made


class FusedGeGLUMLP(FusedGLUMLP):
    """A :class:`FusedGLUMLP` with GELU; ``approximate`` is "tanh" or "none" (erf), as in ``nn.GELU``."""

    _allowed = ("gelu_tanh", "gelu")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool | tuple[bool, ...] | list[bool] = False,
        approximate: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        keep_activation: bool = False,
    ) -> None:
        if not isinstance(approximate, str):
            raise TypeError(f"approximate must be a str, got {type(approximate).__name__}: {approximate!r}")
        if approximate not in _GELU_FORMS:
            raise ValueError(f"approximate must be one of {', '.join(map(repr, _GELU_FORMS))}, got {approximate!r}")
        act = _GELU_FORMS[approximate]
        given = hidden_size, intermediate_size, act, bias, None, recompute, device, dtype
        super().__init__(*given, keep_activation=keep_activation)

    @property
    def approximate(self) -> str:
        """The form of GELU: ``"tanh"`` or ``"none"``."""
        return "tanh" if self.activation == "gelu_tanh" else "none"


class FusedSwiGLUMLP(FusedGLUMLP):
    """:class:`FusedGLUMLP` with SiLU."""

    _allowed = ("silu",)

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool | tuple[bool, ...] | list[bool] = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        keep_activation: bool = False,
    ) -> None:
        given = hidden_size, intermediate_size, "silu", bias, None, recompute, device, dtype
        super().__init__(*given, keep_activation=keep_activation)
