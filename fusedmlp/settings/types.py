"""The typed settings of a kernel launch."""

from __future__ import annotations

from dataclasses import dataclass

# gluon: warp-specialised (9.x). tma: persistent, TMA descriptors (9.0 and newer). pointer: plain loads. pair: cuBLAS
# and one pointwise kernel, or cuBLAS alone. small: plain loads, weights on the left, for few tokens.
FAMILIES = ("gluon", "tma", "pointer", "pair", "small")
# What has no kernel of ours but a Gluon one ("pair" means the separate launches that it stands for); what has one.
GLUON_ONLY_OPS = ("glu_grads", "glu_weight_grads", "mlp_grads", "mlp_weight_grads")
GLUON_OPS = ("linear_act", "linear_relu", "glu", "glu_backward", "act_backward", *GLUON_ONLY_OPS)
# Products alone, that have a kernel for small batches; else "pair" is cuBLAS.
PRODUCTS = ("down", "dgrad")
ALONE = ("linear_relu", *PRODUCTS)  # of these "pair" is one launch of cuBLAS

# What has a kernel for small batches, and how many tokens those take.
SMALL_TOKENS = {
    "glu": 64,
    "linear_act": 64,
    "linear_relu": 64,
    "down": 256,
    "glu_backward": 64,
    "act_backward": 64,
    "dual_dgrad": 64,
    "dgrad": 64,
}
SMALL_OPS = tuple(SMALL_TOKENS)

# glu_grads: dX and all weight gradients of a gated MLP in one launch; glu_weight_grads: the latter alone; mlp_grads and
# mlp_weight_grads: the same of two layers.
# linear_relu: linear_act with ReLU and a bias, which cuBLAS has in an epilogue too: "pair" is then one launch of it.
# dual_dgrad: dX over gate and up; dgrad: dX of two layers. down: the last product of an MLP.
OPS = (*GLUON_OPS, "dual_dgrad", "relu_stack", *PRODUCTS)


@dataclass(frozen=True)
class Settings:
    """How one GEMM kernel is launched.

    Attributes:
        family: one of :data:`FAMILIES`.
        block_m, block_n, block_k: the tile, in elements (for the gated forward block_n of gate and of up each).
        group: tile rows a band, for L2 reuse.
        parts: column parts of the epilogue (1, 2 or 4), which bound its registers; for one weight and few tokens the
            programs that share the sum behind a tile (split-K).
        warps, stages: per program; stages of the load pipeline.
        ctas_per_sm: programs a multiprocessor holds, for persistent grids.
    """

    family: str
    block_m: int = 64
    block_n: int = 64
    block_k: int = 32
    group: int = 8
    parts: int = 1
    warps: int = 4
    stages: int = 3
    ctas_per_sm: int = 1

    def __str__(self) -> str:
        if self.family == "pair":
            return "pair (cuBLAS + pointwise)"
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        text = f"{self.family} {tile} warps {self.warps} stages {self.stages} parts {self.parts}"
        return text if self.group == 8 else f"{text} group {self.group}"
