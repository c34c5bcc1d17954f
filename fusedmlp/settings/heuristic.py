"""Settings from the shape alone. Tiles follow what an H200 measured (bench/results); thresholds are few on purpose,
so that a kernel has at most a handful of specialisations over all token counts."""

from __future__ import annotations

from dataclasses import replace

import torch

from .device import DeviceInfo, triton_version
from .types import PRODUCTS, Settings


def tma_dtype(dtype: torch.dtype) -> bool:
    """fp32 operands would pass through registers on their way to the tensor cores: the pointer kernels serve them."""
    return dtype in (torch.bfloat16, torch.float16)


# Without the Gluon kernel: from this size on (M N K) cuBLAS and a pointwise kernel save more time than their launch
# costs the host, about 25 microseconds (bench/results/h200). Of the other kernels a pair would hold a hidden layer more
# than eager does.
_PAIR_FROM = {"glu_backward": 3e10}
# Tiles of 128 x 128 that keep the warp-specialised kernels' programs busy: two warpgroups each, on 132 multiprocessors.
_GLUON_FROM = {"glu": 64, "glu_backward": 128, "linear_act": 130, "act_backward": 128}
_GLUON_TOKENS = {"glu": 256, "glu_backward": 64, "linear_act": 128, "act_backward": 64}  # more than
_GROUPED_WEIGHT = 1024 * 4096  # (N K) from this size on weights are wide
# Tokens up to which the three products after the backward to a hidden layer share a launch (whole steps of
# bench/steps.py): above, each of them fills the device by itself, those of narrow weights later.
_GROUPED_UP_TO, _GROUPED_NARROW_UP_TO, _GROUPED_NARROW = 4096, 8192, 600 * 1536
# With few tokens dX of larger weights stays out of it: its few tiles of long sums would keep the others waiting. So it
# does from smaller weights on where it has a kernel for small batches: of up to 32 tokens and up to 64.
_GROUPED_FEW, _GROUPED_FEW_WEIGHT = 128, {"glu_grads": _GROUPED_WEIGHT, "mlp_grads": 5120 * 14336}
_GROUPED_WITHOUT_DX = {"glu_grads": (700 * 2048, _GROUPED_WEIGHT), "mlp_grads": (_GROUPED_WEIGHT, 2304 * 9216)}
# Tiles of 128 x 128 in dX, up to which it has half as high ones: there are few, their sums are long, and they are what
# the launch waits for.
_GROUPED_LOW_TILES = 30
# The weight gradients alone share a launch where dX stays out of it: of few tokens, and of wide weights.
_GROUPED_WEIGHTS_UP_TO = 512
_GROUPED_MEASURED_UP_TO = 8192  # tokens; at this many 1.5 to 4.5 % are left of what it saves
# Of some hundred tokens, whose tiles of 128 x 128 leave much of the last wave idle, cuBLAS has tiles that do not: its
# product and an activation in place are faster from this ratio of waves on, whole over used.
_PAIR_TOKENS, _PAIR_WAVES = (128, 512), 1.3
# ReLU and a bias cuBLAS has in its epilogue: up to so many tokens it is the faster there, from this weight (N K) on.
_RELU_BY_CUBLAS_UP_TO, _RELU_BY_CUBLAS_WEIGHT = 1024, 3e6
# For few tokens cuBLAS reads weights of this size (N K) so much faster that it makes up for a launch more.
_STREAMED_BY_CUBLAS = {"linear_act": 1.6e7, "glu_backward": 5.5e7, "act_backward": 5.5e7}
# Tokens up to which the kernels for small batches serve an operation in 16 bits: they have tiles of 16 and 32 tokens.
_SMALL_UP_TO = 32
# Up to 64, where TMA has tiles too, they serve dX of weights that are neither narrow nor wide (columns of dX).
_SMALL_DX = (600, 5000)
# And the last product of narrow layers (N K), where they are level with cuBLAS and cost the host a launch alone.
_SMALL_DOWN_UP_TO, _SMALL_DOWN_WEIGHT = 256, 1024 * 4096


def family(op: str, M: int, N: int, K: int, dtype: torch.dtype, tma: bool, gluon: bool, info: DeviceInfo) -> str:
    if op == "relu_stack":
        return "pointer"
    if op == "linear_relu":
        few = M <= _SMALL_UP_TO or M > _RELU_BY_CUBLAS_UP_TO or N * K < _RELU_BY_CUBLAS_WEIGHT
        return family("linear_act", M, N, K, dtype, tma, gluon, info) if few or not gluon else "pair"
    if op in ("glu_weight_grads", "mlp_weight_grads"):
        few, wide = M <= _GROUPED_WEIGHTS_UP_TO, N * K >= _GROUPED_WEIGHT and M <= _GROUPED_MEASURED_UP_TO
        return "gluon" if gluon and (few or (wide and op == "glu_weight_grads")) else "pair"
    if op in ("glu_grads", "mlp_grads"):
        return "gluon" if gluon and _grouped(op, M, N * K) else "pair"
    if tma and M <= _small_up_to(op, N, K) and info.slug != "interpreter":
        return "small"
    if op in PRODUCTS or (gluon and op == "linear_act" and _ends_in_an_idle_wave(M, N, info.sms)):
        return "pair"
    if gluon and M > _GLUON_TOKENS[op] and _tiles(M, N, 128, 128) >= _GLUON_FROM[op]:
        return "gluon"
    if info.slug == "interpreter":
        return "tma" if tma else "pointer"
    if dtype == torch.float32:
        # Full fp32 runs on the plain FMA units, and TF32 wants its operands rounded on the way to the tensor cores:
        # in both cuBLAS is ahead of compiled tiles.
        return "pair"
    if M * N * K >= _PAIR_FROM.get(op, float("inf")):
        return "pair"
    if op == "dual_dgrad" and N > 1024 and (M <= 32 or M > 256):
        return "pair"  # cuBLAS has tiles for such widths that a power of two has not, and splits sums where M is small
    if M <= 32 and N * K >= _STREAMED_BY_CUBLAS.get(op, float("inf")):
        return "pair"
    return "tma" if tma else "pointer"


def _ends_in_an_idle_wave(M: int, N: int, sms: int) -> bool:
    tiles = _tiles(M, N, 128, 128)
    waves = -(-tiles // sms)
    return _PAIR_TOKENS[0] < M <= _PAIR_TOKENS[1] and waves > 1 and waves * sms >= _PAIR_WAVES * tiles


def _small_up_to(op: str, N: int, K: int) -> int:
    if op == "down" and N * K <= _SMALL_DOWN_WEIGHT:
        return _SMALL_DOWN_UP_TO
    return 64 if op in ("dual_dgrad", "dgrad") and _SMALL_DX[0] < N < _SMALL_DX[1] else _SMALL_UP_TO


def dx_apart(op: str, M: int, weight: int) -> bool:
    """Whether the launch for all products (glu_grads, mlp_grads) leaves dX of weights of this size (N K) to a kernel
    for small batches, where there is one for these tokens."""
    return M <= 64 and weight >= _GROUPED_WITHOUT_DX[op][M > 32]


def _grouped(op: str, M: int, weight: int) -> bool:
    if M <= _GROUPED_FEW:
        return weight <= _GROUPED_FEW_WEIGHT[op]
    return M <= (_GROUPED_NARROW_UP_TO if weight <= _GROUPED_NARROW else _GROUPED_UP_TO)


def settings(
    op: str, M: int, N: int, K: int, dtype: torch.dtype, family: str, info: DeviceInfo, aligned: bool = True
) -> Settings:
    """``aligned``: rows start at multiples of 16 bytes. Where they do not, every element has an address of its own,
    and smaller tiles keep those in registers."""
    if op == "relu_stack":
        return _relu_stack(dtype, aligned)
    if op == "linear_relu":
        return settings("linear_act", M, N, K, dtype, family, info, aligned)
    if family == "pair":
        return Settings("pair")
    if family == "gluon":
        return _gluon(op, M, N, K)
    if family == "pointer":
        return _pointer(op, M, N, dtype, aligned)
    if family == "small":
        return _small(op, M, N, K, dtype, info, aligned)
    found = _TMA[op](M, N, K)
    found = _in_tensor_memory(op, found) if info.capability >= (10, 0) else found
    return _beside_the_epilogue(op, found, info) if triton_version() < (3, 6) else found


def _in_tensor_memory(op: str, found: Settings) -> Settings:
    """From 10.0 on accumulators live in tensor memory: they leave it through shared memory and more registers."""
    if op == "glu" and found.block_n == 128:
        return replace(found, stages=3)
    if op == "linear_act" and found.block_n >= 128 and found.block_m == 128:
        return _tma(128, 128, 64, parts=2, warps=8)
    return found


def _beside_the_epilogue(op: str, found: Settings, info: DeviceInfo) -> Settings:
    """Triton 3.5 keeps what gate and up are laid out anew in beside the stages, newer ones in the place of some: with
    four stages deep tiles would take more shared memory than a block of newer GPUs may have."""
    deep = found.block_k == 128 and info.capability >= (10, 0)
    return replace(found, stages=3) if op == "glu" and found.block_m == 64 and deep else found


def _relu_stack(dtype: torch.dtype, aligned: bool) -> Settings:
    if dtype == torch.float32:
        return Settings("pointer", 32, 32, 64, warps=4, stages=3)
    return Settings("pointer", 32, 32, 128 if aligned else 64, warps=4, stages=4 if aligned else 3)


def _pointer(op: str, M: int, N: int, dtype: torch.dtype, aligned: bool) -> Settings:
    if dtype == torch.float32:
        # 4-byte operands: half the tile for the same shared memory (99 KiB on the smallest sm_8x).
        return Settings("pointer", 64, 32 if op == "glu" else 64, 32, warps=4, stages=3)
    if M <= 64 or N <= 64:
        return Settings("pointer", 32 if M <= 32 else 64, 32, 64, warps=4, stages=3)
    if op == "glu":
        return Settings("pointer", 128, 64, 32, warps=8, stages=3)
    if op in ("glu_backward", "act_backward"):
        return Settings("pointer", 64, 64, 32, warps=8, stages=3)
    if M <= 512:
        return Settings("pointer", 64, 64, 64 if aligned else 32, warps=4, stages=3)
    return Settings("pointer", 128, 128 if aligned else 64, 32, warps=8, stages=3)


def _small(op: str, M: int, N: int, K: int, dtype: torch.dtype, info: DeviceInfo, aligned: bool) -> Settings:
    """Weight tiles that bring about 32 KiB under way a multiprocessor, which hides the latency of memory."""
    m = 16 if M <= 16 else 32 if M <= 32 else 64
    n, k, stages = (64, 64, 5) if op == "glu" else (64, 128, 4)
    if op == "down" and _tiles(M, N, m, 64) < 13:
        n = 32
    if dtype == torch.float32 or not aligned:
        n, k = 32, 32  # each operand, or each address, in registers of its own
    weights = 2 if op == "glu" else 1  # in a stage
    stage = (weights * n + m) * k * dtype.itemsize
    stages = max(2, min(stages, (info.shared - 4096) // stage))  # less on GPUs whose blocks have 99 KiB
    parts, tiles = 1, _tiles(M, N, m, n)
    if op in ("dual_dgrad", "dgrad"):
        parts = _dx_splits(M, tiles, 2 * K if op == "dual_dgrad" else K, info.sms)
    elif op == "down" or (op == "linear_act" and 4 * tiles <= info.sms and K >= 1024):
        parts = _splits(M, tiles, K, info.sms)
    warps = 8 if m > 32 and "backward" in op else 4  # else its epilogue would not fit into registers
    return Settings("small", m, n, k, parts=parts, warps=warps, stages=stages)


def _splits(M: int, tiles: int, K: int, sms: int) -> int:
    """Programs that share a sum, of at least three steps each: up to a wave of them, and for up to four a quarter more
    where tokens are few (144 and 160 on 132 multiprocessors are faster than 72)."""
    fit = [1]
    for parts in (2, 3, 4, 6, 8):
        wave = 1.25 if parts <= 4 and M <= 64 else 1.0
        if parts * tiles <= wave * sms and 384 * parts <= K and (parts != 3 or M <= 64):
            fit.append(parts)
    return fit[-1]


def _dx_splits(M: int, tiles: int, K: int, sms: int) -> int:
    """K: of both sums. Up to 16 tokens two programs a multiprocessor keep more of the weights under way, unless some
    get one and others two; of more tokens a wave of them, two where a wave is not full before."""
    fit = [parts for parts in (2, 3, 4, 6, 8) if 384 * parts <= K]
    wave = [parts for parts in fit if parts * tiles <= sms]
    two = [parts for parts in fit if 1.35 * sms < parts * tiles <= 2 * sms]
    return max(wave + two if M <= 16 else wave or two, default=1)


def _gluon(op: str, M: int, N: int, K: int) -> Settings:
    if op in ("glu_grads", "mlp_grads"):
        low = M <= 64 or _tiles(M, K, 128, 128) <= _GROUPED_LOW_TILES
        return Settings("gluon", 64 if low else 128, 128, 64, parts=2, warps=4, stages=6)
    if op in ("glu_weight_grads", "mlp_weight_grads"):
        return Settings("gluon", 128, 128, 64, parts=2, warps=4, stages=5 if M <= 256 else 6)
    tiles = _tiles(M, N, 128, 128)
    if op == "linear_act":
        return Settings("gluon", 64 if tiles < 250 and M > 256 else 128, 128, 64, parts=2, warps=4, stages=6)
    if op in ("glu_backward", "act_backward"):
        low = M <= 64 or (150 <= tiles < 200 and M > 256)
        parts = 2 if M <= 64 or (tiles < 200 and op == "act_backward") else 4
        stages = 4
        if parts == 4 and not low:
            # Long products wait for operands, short ones for gate and up: they share the memory.
            stages = (5 if op == "act_backward" else 4) + (1 if K >= 2048 else 0)
        return Settings("gluon", 64 if low else 128, 128, 64, parts=parts, warps=4, stages=stages)
    return Settings("gluon", 64 if tiles < 128 else 128, 64, 64, warps=4, stages=6)


def _tma(m: int, n: int, k: int, *, parts: int = 1, warps: int = 4, stages: int = 4, ctas: int = 1) -> Settings:
    return Settings("tma", m, n, k, parts=parts, warps=warps, stages=stages, ctas_per_sm=ctas)


def _tiles(M: int, N: int, m: int, n: int) -> int:
    return -(-M // m) * -(-N // n)


def _few(M: int, N: int) -> Settings | None:
    """Tiles for up to 256 tokens, of one weight that is neither read too often nor too wide: those of 64 x 32 are
    resident two at a time."""
    if M > 256:
        return None
    if _tiles(M, N, 64, 32) <= 264:
        return _tma(64, 32, 128, ctas=2)
    return _tma(64, 64, 128, stages=3, ctas=2) if N < (20480 if M <= 64 else 8192) else None


def _linear_act(M: int, N: int, K: int) -> Settings:
    if few := _few(M, N):
        return few
    if M <= 256:
        if M <= 64 or 12288 <= N < 20480:
            return _tma(64, 128, 64, ctas=2)
        if M > 128 and 5120 <= N <= 8448:
            return _tma(64, 128, 64, ctas=2)  # a wave of 132 of them, two at a time
        return _tma(64, 64, 64, ctas=3) if N < 12288 else _tma(128, 128, 64, parts=2, stages=3, ctas=2)
    if _tiles(M, N, 128, 128) < 200:
        return _tma(64, 64, 64, ctas=3) if _tiles(M, N, 64, 64) <= 396 else _tma(64, 128, 64, ctas=2)
    if K >= 2048 and _tiles(M, N, 128, 256) >= 400:
        return _tma(128, 256, 64, parts=2, warps=8)
    return _tma(128, 128, 64, parts=2, stages=3, ctas=2)


def _glu(M: int, N: int, K: int) -> Settings:
    if M <= 64:
        if _tiles(M, N, 64, 16) <= 264:
            return _tma(64, 16, 128, ctas=3)
        return _tma(64, 64, 128) if _tiles(M, N, 64, 64) <= 132 else _tma(64, 64, 64, ctas=2)
    if M <= 256:
        if _tiles(M, N, 64, 32) <= 132:
            return _tma(64, 32, 128, ctas=2)
        if _tiles(M, N, 64, 64) <= 132:
            return _tma(64, 64, 128)
        if N < 8192 or _tiles(M, N, 64, 64) <= 264:
            return _tma(64, 64, 64, ctas=2)
        return _tma(128, 64, 64, stages=3, ctas=2)
    if _tiles(M, N, 128, 64) < 500:
        return _tma(64, 64, 64, ctas=2)
    if K < 2048:
        return _tma(128, 64, 64, stages=3, ctas=2)  # two programs a multiprocessor hide each other's epilogue
    return _tma(128, 128, 64, warps=8)


def _glu_backward(M: int, N: int, K: int) -> Settings:
    if few := _few(M, N):
        return few
    if M <= 256:
        wide = M <= 64 or N >= 12288
        return _tma(64, 128, 64, parts=2, ctas=2) if wide else _tma(64, 64, 64, parts=2, ctas=3)
    if K < 512 or _tiles(M, N, 128, 64) < 450:
        return _tma(64, 64, 64, parts=2, ctas=3)
    if K < 2048:
        return _tma(128, 64, 64, parts=2, ctas=2)
    return _tma(128, 128, 64, parts=2, warps=8)


def _act_backward(M: int, N: int, K: int) -> Settings:
    if M <= 64:
        return _few(M, N) or _tma(64, 128, 64, parts=2, ctas=2)
    if M <= 256 and _tiles(M, N, 64, 32) <= 264:
        return _tma(64, 32, 128, ctas=2)
    if _tiles(M, N, 64, 64) <= 264:
        return _tma(64, 64, 128, stages=3, ctas=2)
    if K >= 2048 and M > 256 and _tiles(M, N, 128, 128) >= 130:
        return _tma(128, 128, 64, parts=2, warps=8)
    return _tma(128, 64, 64, parts=2, ctas=2)


def _dual_dgrad(M: int, N: int, K: int) -> Settings:
    if M <= 256:
        if N < 1024:
            return _tma(64, 16, 128, stages=5, ctas=2)
        return _tma(64, 64, 128, stages=6) if M <= 64 or N < 5120 else _tma(64, 128, 128)
    if N >= 1536:
        return _tma(128, 256, 64, parts=2, warps=8)
    tiles = _tiles(M, N, 64, 128)
    if tiles <= 64:
        return _tma(64, 64, 128, stages=6)
    return _tma(64, 128, 128) if tiles < 130 else _tma(128, 128, 128, parts=2, warps=8, stages=3)


_TMA = {
    "linear_act": _linear_act,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "act_backward": _act_backward,
    "dual_dgrad": _dual_dgrad,
}
