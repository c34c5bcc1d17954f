"""The nn.Modules that own weights.

The MLPs hold plain ``nn.Linear`` children under the eager names, so that optimisers, adapters, quantisers
and sharding plans see what they expect. Where a child is no longer a plain ``nn.Linear`` (an adapter, a
hook, a parametrisation, a quantised or sharded weight), the forward calls the children as eager does and
says so in the plan.
"""

from __future__ import annotations

from ._glu import FusedGeGLUMLP, FusedGLUMLP, FusedSwiGLUMLP
from ._linear_act import FusedLinearAct, FusedLinearReLU, FusedReLUMLP
from ._mlp import FusedMLP

__all__ = [
    "FusedGLUMLP",
    "FusedGeGLUMLP",
    "FusedLinearAct",
    "FusedLinearReLU",
    "FusedMLP",
    "FusedReLUMLP",
    "FusedSwiGLUMLP",
]
