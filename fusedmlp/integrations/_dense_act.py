"""The first half of a BERT-style MLP: ``act(dense(x))``, the second half living in another module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import explain, functional
from .._adopt import read_dense_act
from .._children import first_reason, has_global_hooks, plain_parts
from .._load import CheckedLoad
from ..activations import ACTIVATIONS, Activation


class FusedDenseAct(CheckedLoad):
    """``act(dense(x))`` with a plain ``nn.Linear`` child called ``dense``, as ``BertIntermediate`` has it.

    Made by :meth:`from_module` (and by ``patch()``), so that names and parameters stay those of the eager
    module.

    Shape: hidden_states [..., dense.in_features] -> [..., dense.out_features].
    """

    dense: nn.Linear

    def __init__(self, dense: nn.Linear, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.dense = dense

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., dense.in_features] -> [..., dense.out_features]; errors as ``functional.linear_act``."""
        parts = plain_parts(self._modules.get("dense"))
        if parts is not None and not has_global_hooks():
            return functional.linear_act(hidden_states, parts[0], parts[1], self.activation)
        if not torch.compiler.is_compiling():
            explain.note_eager("linear_act", first_reason(("dense",), self._modules))
        return ACTIVATIONS[self.activation].fn(self.dense(hidden_states))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"

    @classmethod
    def from_module(cls, eager: nn.Module, activation: str | Activation | None = None) -> FusedDenseAct:
        """A fused layer over the very ``dense`` of ``eager``: no copy, same ``state_dict``.

        Raises:
            TypeError, ValueError: ``eager`` computes anything but ``act(dense(x))``; the message says what.
        """
        dense, act = read_dense_act(eager, activation)
        made = cls(dense, act.name)
        made.training = eager.training
        return made
