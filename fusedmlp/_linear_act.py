"""Modules made of Linear + activation: one layer that owns its weight, and a stack of Linear + ReLU."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import explain, functional, steady
from ._adopt import read_linear_act, read_relu_stack
from ._children import first_reason, has_global_hooks, is_plain_tensor, plain_parts
from ._load import CheckedLoad
from ._module_config import accepted, bias_flags, config_activation, config_bias, config_sizes, positive_size
from .activations import ACTIVATIONS, Activation

_STACK = ("relu_mlp", "relu", False, False)
Act = TypeVar("Act", bound="FusedLinearAct")
Stack = TypeVar("Stack", bound="FusedReLUMLP")


class FusedLinearAct(CheckedLoad):
    """``act(x W^T + b)`` in one kernel.

    It owns ``weight`` [out_features, in_features] and ``bias`` [out_features], named and initialised as in
    ``nn.Linear``, but is no subclass of it: nothing should take it for a bare Linear.

    Args:
        in_features, out_features: sizes, at least 1.
        bias: whether there is a bias.
        activation: one of ``fusedmlp.activations.ACTIVATIONS`` or a Hugging Face name of one.
        device, dtype: as in ``nn.Linear``.

    Shape: x [..., in_features] -> [..., out_features].

    Raises:
        ValueError: a size is not positive, or the activation is unknown.
        TypeError: a size is no int.
    """

    _allowed: ClassVar[tuple[str, ...] | None] = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | Activation = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_features = positive_size("in_features", in_features)
        out_features = positive_size("out_features", out_features)
        (has_bias,) = bias_flags(bias, ("bias",))
        name = accepted(type(self), activation, self._allowed)
        weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        made = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if has_bias else None
        super().__init__()
        self._own(weight, made, name)
        self.reset_parameters()

    def _own(self, weight: Any, bias: Any, activation: str) -> None:
        self.out_features, self.in_features = weight.shape
        self.activation = activation
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters as ``nn.Linear`` does, in its order."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]; errors as ``functional.linear_act``."""
        parameters = self._parameters
        # A parametrisation or pruning moves the Parameter away; attribute look-up finds what it computes.
        weight: Any = parameters["weight"] if "weight" in parameters else self.weight
        bias: Any = parameters["bias"] if "bias" in parameters else self.bias
        if is_plain_tensor(weight) and (bias is None or is_plain_tensor(bias)):
            return functional.linear_act(x, weight, bias, self.activation)
        if not torch.compiler.is_compiling():
            kind = type(weight if not is_plain_tensor(weight) else bias).__name__
            explain.note_eager("linear_act", f"a parameter is a {kind}, not a plain Parameter")
        return ACTIVATIONS[self.activation].fn(F.linear(x, weight, bias))

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, activation={self.activation}"

    @classmethod
    def from_module(cls: type[Act], eager: nn.Module, activation: str | Activation | None = None) -> Act:
        """A fused layer over the very Parameters of ``eager``: no copy, earlier optimisers keep working.

        Args:
            eager: ``nn.Sequential(nn.Linear, act)``, or an ``nn.Linear`` together with ``activation``.
            activation: what follows the Linear; may be left out where ``eager`` says it.

        Raises:
            TypeError, ValueError: ``eager`` computes anything else, or is wrapped (hooks, parametrisations).
        """
        linear, act = read_linear_act(eager, activation)
        name = accepted(cls, act, cls._allowed)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        FusedLinearAct._own(made, linear.weight, linear.bias, name)
        return made.train(eager.training)

    @classmethod
    def from_config(
        cls: type[Act],
        config: object,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool | None = None,
    ) -> Act:
        """hidden_size -> intermediate_size with a Hugging Face config's activation, as ``BertIntermediate``.

        Raises:
            TypeError: a field is missing.
            ValueError: a size or the activation is not supported.
        """
        hidden, intermediate = config_sizes(config)
        act = accepted(cls, config_activation(config), cls._allowed)
        return cls._make(hidden, intermediate, bool(config_bias(config, True, bias)), act, device, dtype)

    @classmethod
    def from_safetensors(
        cls: type[Act],
        path: str | os.PathLike[str],
        prefix: str,
        activation: str | Activation = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Act:
        """The layer ``<prefix>.weight`` (and ``<prefix>.bias``) of a safetensors file, reading nothing else.

        Raises:
            RuntimeError: a tensor is missing, surplus or misshapen under the prefix; the message lists them.
        """
        from .integrations.checkpoints import build_from_file

        act = accepted(cls, activation, cls._allowed)

        def make(shapes: dict[str, tuple[int, ...]]) -> Act:
            out_features, in_features = shapes["weight"]
            return cls._make(in_features, out_features, "bias" in shapes, act, "meta", None)

        return build_from_file(path, prefix, ("",), make, device, dtype)

    @classmethod
    def _make(
        cls: type[Act],
        in_features: int,
        out_features: int,
        bias: bool,
        activation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> Act:
        made = cls.__new__(cls)
        FusedLinearAct.__init__(made, in_features, out_features, bias, activation, device, dtype)
        return made


class FusedLinearReLU(FusedLinearAct):
    """``relu(x W^T + b)`` in one kernel; see :class:`FusedLinearAct`."""

    _allowed = ("relu",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, "relu", device, dtype)


class FusedReLUMLP(CheckedLoad):
    """A stack of Linear + ReLU, the last layer activated too.

    Its ``state_dict`` is that of ``nn.Sequential(Linear, ReLU, Linear, ReLU, ...)``: ``0.weight``,
    ``0.bias``, ``2.weight``, ...; the children are plain ``nn.Linear``.

    Args:
        sizes: widths, input first: ``[1024, 1024, 512]`` makes two layers.
        bias: one flag, or one for each layer.
        device, dtype: as in ``nn.Linear``.

    Shape: x [..., sizes[0]] -> [..., sizes[-1]].

    Raises:
        ValueError: fewer than two sizes, or one is not positive.
        TypeError: ``sizes`` is no sequence of ints.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        bias: bool | Sequence[bool] = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
            raise TypeError(f"sizes must be a sequence of ints, got {type(sizes).__name__}: {sizes!r}")
        widths = [positive_size(f"sizes[{i}]", s) for i, s in enumerate(sizes)]
        if len(widths) < 2:
            raise ValueError(f"sizes must hold at least two widths (input, output), got {list(sizes)}")
        names = [str(2 * i) for i in range(len(widths) - 1)]
        flags = bias_flags(bias, [f"layer {i}" for i in range(len(names))])
        pairs = zip(widths, widths[1:], flags)
        linears = [nn.Linear(i, o, bias=b, device=device, dtype=dtype) for i, o, b in pairs]
        super().__init__()
        self._own(dict(zip(names, linears)))

    def _own(self, linears: dict[str, nn.Linear]) -> None:
        self.layer_names = tuple(linears)
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., sizes[0]] -> [..., sizes[-1]]; errors as ``functional.relu_mlp``."""
        y = steady.served(_STACK, self._modules, self.layer_names, x)
        if y is not None:
            return y
        children = self._modules
        parts = [plain_parts(children.get(name)) for name in self.layer_names]
        plain = [p for p in parts if p is not None]
        if len(plain) == len(parts) and not has_global_hooks():
            return functional.relu_mlp(x, [w for w, _ in plain], [b for _, b in plain])
        if not torch.compiler.is_compiling():
            explain.note_eager("relu_mlp", first_reason(self.layer_names, children))
        for name in self.layer_names:
            x = F.relu(getattr(self, name)(x))
        return x

    def extra_repr(self) -> str:
        return "activation=relu after every layer"

    @classmethod
    def from_module(cls: type[Stack], eager: nn.Module) -> Stack:
        """A fused stack over the very Linears of ``eager``, under their names: no copy, same ``state_dict``.

        Args:
            eager: an ``nn.Sequential`` of Linear and ReLU in turn, or any module whose direct children are
                Linears that it applies in their order, each followed by a ReLU (a module or ``F.relu``).

        Raises:
            TypeError, ValueError: ``eager`` computes anything else, such as a last Linear without a ReLU.
        """
        linears = read_relu_stack(eager)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.training = eager.training  # its children keep their own flags
        FusedReLUMLP._own(made, linears)
        return made

    @classmethod
    def from_safetensors(
        cls: type[Stack],
        path: str | os.PathLike[str],
        prefix: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Stack:
        """The stack ``<prefix>.0.weight``, ``<prefix>.2.weight``, ... of a safetensors file, and no more.

        Raises:
            RuntimeError: a tensor is missing, surplus or misshapen under the prefix; the message lists them.
        """
        from .integrations.checkpoints import build_from_file

        def make(shapes: dict[str, tuple[int, ...]]) -> Stack:
            count = sum(name.endswith(".weight") for name in shapes)
            names = [str(2 * i) for i in range(count)]
            widths = [shapes[f"{n}.weight"] for n in names]
            made = cls.__new__(cls)
            sizes = [widths[0][1], *(w[0] for w in widths)]
            FusedReLUMLP.__init__(made, sizes, [f"{n}.bias" in shapes for n in names], "meta")
            return made

        return build_from_file(path, prefix, None, make, device, dtype)
