"""Layers as model code writes them, over the Linears of a fused one."""

from __future__ import annotations

from torch import Tensor, nn


class EagerGLU(nn.Module):
    def __init__(self, fused: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = fused.gate_proj, fused.up_proj, fused.down_proj
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
