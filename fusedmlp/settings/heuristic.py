"""Settings from the shape alone. Tiles follow what an H200 measured (bench/results); thresholds are few on purpose,
so that a kernel has at most a handful of specialisations over all token counts."""

from __future__ import annotations

import torch

from .device import DeviceInfo
from .types import Settings


def tma_dtype(dtype: torch.dtype) -> bool:
    """fp32 operands would pass through registers on their way to the tensor cores: the pointer kernels serve them."""
    return dtype in (torch.bfloat16, torch.float16)


def family(op: str, dtype: torch.dtype, precision: str, tma: bool, info: DeviceInfo) -> str:
    if op == "relu_stack":
        return "pointer"
    if dtype == torch.float32 and precision == "ieee" and info.slug != "interpreter":
        # Full fp32 runs on the plain FMA units, where cuBLAS is far ahead of compiled tiles.
        return "pair"
    return "tma" if tma else "pointer"


def settings(op: str, M: int, N: int, K: int, dtype: torch.dtype, family: str, info: DeviceInfo) -> Settings:
    if family == "pair":
        return Settings("pair")
    if op == "relu_stack":
        return _relu_stack(dtype)
    if family == "pointer":
        return _pointer(op, M, N, dtype, info)
    return _TMA[op](M, N, K)


def _relu_stack(dtype: torch.dtype) -> Settings:
    if dtype == torch.float32:
        return Settings("pointer", 32, 32, 64, warps=4, stages=3)
    return Settings("pointer", 32, 32, 128, warps=4, stages=4)


def _pointer(op: str, M: int, N: int, dtype: torch.dtype, info: DeviceInfo) -> Settings:
    if dtype == torch.float32:
        # 4-byte operands: half the tile for the same shared memory (99 KiB on the smallest sm_8x).
        return Settings("pointer", 64, 32 if op == "glu" else 64, 32, warps=4, stages=3)
    if M <= 64 or N <= 64:
        return Settings("pointer", 32 if M <= 32 else 64, 32, 64, warps=4, stages=3)
    if op == "glu":
        return Settings("pointer", 128, 64, 32, warps=8, stages=3)
    if M <= 512:
        return Settings("pointer", 64, 64, 64, warps=4, stages=3)
    return Settings("pointer", 128, 128, 32, warps=8, stages=3)


def _linear_act(M: int, N: int, K: int) -> Settings:
    if M <= 64:
        return Settings("tma", 64, 32, 128, warps=4, stages=4, ctas_per_sm=2)
    if M <= 256:
        return Settings("tma", 128, 64, 64, warps=4, stages=4, ctas_per_sm=2)
    if M <= 2048 or N < 2048 or K < 2048:
        return Settings("tma", 128, 128, 64, parts=2, warps=4, stages=3, ctas_per_sm=2)
    return Settings("tma", 128, 256, 64, parts=2, warps=8, stages=4)


def _glu(M: int, N: int, K: int) -> Settings:
    if M <= 128:
        if N >= 8192:
            return Settings("tma", 128, 64, 64, warps=4, stages=3, ctas_per_sm=2)
        return Settings("tma", 64, 32, 128, warps=4, stages=4, ctas_per_sm=2)
    if K < 2048 and M <= 1024:
        return Settings("tma", 64, 64, 64, warps=4, stages=4, ctas_per_sm=2)
    return Settings("tma", 128, 128, 64, warps=8, stages=4)


def _glu_backward(M: int, N: int, K: int) -> Settings:
    if M <= 256:
        return Settings("tma", 64, 64, 64, warps=4, stages=4, ctas_per_sm=2)
    if K < 2048 or N < 2048:
        return Settings("tma", 128, 64, 64, parts=2, warps=4, stages=4, ctas_per_sm=2)
    return Settings("tma", 128, 128, 64, parts=2, warps=8, stages=4)


def _act_backward(M: int, N: int, K: int) -> Settings:
    if M <= 256:
        return Settings("tma", 64, 64, 64, warps=4, stages=4, ctas_per_sm=2)
    if M <= 1024 or K < 1024:
        return Settings("tma", 128, 64, 64, parts=2, warps=4, stages=4, ctas_per_sm=2)
    return Settings("tma", 128, 128, 64, parts=2, warps=8, stages=4)


def _dual_dgrad(M: int, N: int, K: int) -> Settings:
    if M <= 1024 and N <= 1024:
        return Settings("tma", 64, 64, 128, warps=4, stages=4, ctas_per_sm=1)
    if M <= 256:
        return Settings("tma", 64, 64, 128, warps=4, stages=4, ctas_per_sm=1)
    return Settings("tma", 128, 256, 64, parts=2, warps=8, stages=4)


_TMA = {
    "linear_act": _linear_act,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "act_backward": _act_backward,
    "dual_dgrad": _dual_dgrad,
}
