"""Fused MLP layers for PyTorch, as Triton kernels with forward and backward.

Importing this touches no GPU and does not import Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import functional, layers
from .activations import ACTIVATIONS, Activation, resolve_activation
from .explain import Explanation, PlanNote, explain_plan
from .functional import glu_mlp, linear_act, mlp, relu_mlp
from .modules import (
    FusedGeGLUMLP,
    FusedGLUMLP,
    FusedLinearAct,
    FusedLinearReLU,
    FusedMLP,
    FusedReLUMLP,
    FusedSwiGLUMLP,
)
from .settings import calculate_settings

if TYPE_CHECKING:
    from ._warmup import WarmupReport, warmup
    from .integrations.transformers import PatchReport, patch, unpatch
    from .profiling.launches import LaunchCounts, count_launches

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Explanation",
    "FusedGLUMLP",
    "FusedGeGLUMLP",
    "FusedLinearAct",
    "FusedLinearReLU",
    "FusedMLP",
    "FusedReLUMLP",
    "FusedSwiGLUMLP",
    "LaunchCounts",
    "PatchReport",
    "PlanNote",
    "WarmupReport",
    "calculate_settings",
    "count_launches",
    "explain_plan",
    "functional",
    "glu_mlp",
    "layers",
    "linear_act",
    "mlp",
    "patch",
    "relu_mlp",
    "resolve_activation",
    "unpatch",
    "warmup",
]

# Beside the line from modules to kernels, so loaded when first asked for.
_LAZY = {
    "patch": "integrations.transformers",
    "unpatch": "integrations.transformers",
    "PatchReport": "integrations.transformers",
    "count_launches": "profiling.launches",
    "LaunchCounts": "profiling.launches",
    "warmup": "_warmup",
    "WarmupReport": "_warmup",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
