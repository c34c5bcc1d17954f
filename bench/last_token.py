"""Weight gradients that lack the last tokens: which products of cuBLAS, and is any left in fusedmlp?

    python bench/last_token.py                                       prints, 40 s on a GPU
    python bench/last_token.py --out bench/results/h200/findings/last-token.json

cuBLAS has kernels for products A^T B of 16 bits that leave the last rows of both out at some row counts; where its
choice falls on one, a Linear's weight gradient lacks the last tokens, in eager PyTorch too. fusedmlp.plan.left_out says
at which token counts; there fusedmlp computes the last tokens apart.

Products: torch.mm(A.t(), B) with A zero but for the last token and B of ones, so that a result without that token is
zero. What a kernel adds up does not depend on the values. "foretold": the losses at counts that left_out says.
Modules: the weight gradients of a GeGLU MLP, eager and fused, from an upstream gradient that is zero but for the last
token, at counts that left_out says; lost are those that are zero.

Exit code: 0; 1 where a product loses tokens at another count, or fusedmlp loses any; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import common
from bench.script import script
from bench.variants import eager_module
from fusedmlp import FusedGeGLUMLP
from fusedmlp.plan import left_out

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (
    *((128, 128), (512, 128), (256, 256), (512, 256), (1024, 256), (768, 384), (1536, 384), (768, 768), (1024, 1024)),
    *((3072, 768), (2048, 2048), (4096, 768), (6144, 768), (2304, 2048)),
)
# The counts that may lack tokens are 64 n + r; the others are there to be found whole.
TOKENS = tuple(64 * n + r for n in range(1, 513) for r in (0, 1, 3, 8))
MODULES = ((128, 256), (256, 512), (256, 1024), (384, 1536), (768, 3072))
MODULE_TOKENS = tuple(64 * n + r for n in range(1, 257) for r in (1, 2) if left_out(64 * n + r))


def products(size: tuple[int, int], tokens: Sequence[int], dtype: torch.dtype) -> list[int]:
    """The token counts at which a product of this size lacks the last one."""
    a = torch.zeros(max(tokens), size[0], device="cuda", dtype=dtype)
    b = torch.ones(max(tokens), size[1], device="cuda", dtype=dtype)
    sums = torch.zeros(len(tokens), device="cuda", dtype=dtype)
    for i, count in enumerate(tokens):
        a[count - 1].fill_(1)
        sums[i : i + 1] = torch.mm(a[:count].t(), b[:count])[0, :1]
        a[count - 1].zero_()
    return [count for count, found in zip(tokens, sums.tolist(), strict=True) if found != 1]


def lost_by(module: torch.nn.Module, tokens: int, hidden: int, dtype: torch.dtype) -> int:
    """How many of a module's weight gradients lack the last token."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    dy = torch.zeros_like(x)
    dy[-1].normal_()
    for p in module.parameters():
        p.grad = None
    module(x).backward(dy)
    largest = torch.stack([p.grad.abs().amax() for p in module.parameters() if p.grad is not None])
    return int((largest == 0).sum())


@script
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    gpu = common.need_gpu()
    content = common.finding("last_token", gpu) | {"cublas": common.version("nvidia-cublas")}
    content |= {"products": {}, "modules": {}}
    gradients = 3 * len(MODULE_TOKENS)
    wrong = 0
    for name, dtype in DTYPES.items():
        for size in SIZES:
            lost = products(size, TOKENS, dtype)
            foretold = sum(map(left_out, lost))
            wrong += len(lost) - foretold
            found: dict[str, Any] = {"counts": len(TOKENS), "lost": len(lost), "foretold": foretold, "first": lost[:8]}
            content["products"][f"{name} {size[0]} x {size[1]}"] = found
            print(f"product {name:8} {size[0]:4} x {size[1]:4}: {found}", flush=True)
        for width in MODULES:
            torch.manual_seed(0)
            eager = eager_module("geglu", *width, device="cuda", dtype=dtype)
            both = {"eager": eager, "fused": FusedGeGLUMLP.from_module(eager)}
            counts = {k: sum(lost_by(m, t, width[0], dtype) for t in MODULE_TOKENS) for k, m in both.items()}
            wrong += counts["fused"]
            content["modules"][f"{name} {width[0]} -> {width[1]}"] = {"gradients": gradients} | counts
            print(f"module {name:8} {width[0]:4} -> {width[1]:4}: of {gradients} lost {counts}", flush=True)
    if args.out:
        common.write_finding(content, args.out)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
