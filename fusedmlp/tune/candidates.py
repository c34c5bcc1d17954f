"""What may serve each GEMM kernel, and the rule that picks one of the measured.

``bench/sweep.py`` and ``python -m fusedmlp tune`` measure the same candidates and choose by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..settings.types import ALONE, GLUON_ONLY_OPS, PRODUCTS, SMALL_TOKENS, Settings

# cuBLAS and a pointwise kernel are one launch more than a fused kernel, which must pay for itself: about what a
# call of cuBLAS costs the host (22 to 50 were seen), in microseconds. Set with the sweep in view: at 8192 tokens,
# 768 -> 3072, the pair would save 22 in the gated backward, and stays unused.
PAIR_MUST_SAVE = 25.0
# The table may take it where it holds no more memory than eager does; elsewhere it is measured to be compared with.
PAIR_MAY_SERVE = ("glu_backward", "dual_dgrad", "glu_grads", "glu_weight_grads", "linear_act", *ALONE)
PAIR_MAY_SERVE_TOKENS = 256  # at most: there a hidden layer more is small beside the weights, for any op
# A call of cuBLAS costs the host so much more than one launch of a program (15 to 25 against 5 were seen) that with few
# tokens, while the host is what waits, it must save this of a product.
CUBLAS_MUST_SAVE, CUBLAS_TOKENS = 1.5, 256
# A kernel that takes so long, in microseconds, keeps the device busy longer than the host needs for the pair: at two
# kernels a forward and three or four a backward, of which the host needs 30 to 60 and 130 to 250 (bench/host.py). With
# few tokens, which is where cuBLAS reads weights the faster, the pair (or cuBLAS alone) must then save this much.
BUSY = {"forward": 15.0, "backward": 40.0}
MUST_SAVE_OF_BUSY = 1.0
# With more tokens the activation's own kernel has more to move, and other activations than the measured one still more:
# the pair of a first layer must then save this share as well.
PAIR_MUST_SAVE_SHARE = 0.05
# Of these the pair need not pay for itself. Three separate products against one launch: where they are the faster the
# device is busy long enough to hide the host. A product: cuBLAS alone is one launch too (but see above).
PAIR_IS_FREE = ("glu_grads", *ALONE)
LEVEL = 0.15  # microseconds that tell no two kernels for small batches apart
# Not in tables: they win in a window of tokens, which rows that stand for ranges do not describe. See the heuristic.
NOT_TABLED = ("glu_grads", "glu_weight_grads")


def tma(m: int, n: int, k: int, parts: int, warps: int, stages: int, ctas: int) -> Settings:
    return Settings("tma", m, n, k, parts=parts, warps=warps, stages=stages, ctas_per_sm=ctas)


def gluon(m: int, n: int, k: int, parts: int, warps: int, stages: int, group: int = 8) -> Settings:
    return Settings("gluon", m, n, k, group=group, parts=parts, warps=warps, stages=stages)


def small(n: int, k: int, stages: int, splits: int = 1, warps: int = 4) -> Settings:
    """For small batches; block_m follows the tokens."""
    return Settings("small", 0, n, k, parts=splits, warps=warps, stages=stages)


def pointer(m: int, n: int, k: int, warps: int, stages: int) -> Settings:
    return Settings("pointer", m, n, k, warps=warps, stages=stages)


# Products that share a launch, with dX among them or without.
_GROUPED = (
    Settings("pair"),
    gluon(128, 128, 64, 2, 4, 6),
    gluon(128, 128, 64, 2, 4, 5),
    gluon(128, 128, 64, 1, 4, 5),
    gluon(64, 128, 64, 2, 4, 6),
)

# One kernel for few tokens. Its epilogue of 64 of them needs the registers of eight warps.
HIDDEN_BACKWARD = ("glu_backward", "act_backward")
_HIDDEN_BACKWARD_SMALL = (
    small(64, 128, 4),
    small(64, 64, 5),
    small(64, 128, 4, warps=8),
    small(64, 64, 5, warps=8),
    small(32, 128, 4),
    small(128, 64, 4, warps=8),
    small(128, 128, 3, warps=8),
)

# Of dX of one weight and of two.
_DX_SMALL = (
    small(64, 128, 4, 4),
    small(64, 128, 4, 2),
    small(64, 128, 4, 6),
    small(64, 128, 4, 3),
    small(64, 128, 4, 8),
    small(64, 64, 5, 4),
    small(64, 64, 5, 8),
    small(128, 64, 4, 4, warps=8),
    small(128, 64, 4, 8, warps=8),
)

CANDIDATES = {
    "glu": (
        Settings("pair"),
        gluon(128, 128, 64, 1, 8, 4),
        gluon(128, 128, 64, 1, 8, 4, group=16),
        gluon(128, 128, 64, 2, 8, 4),
        gluon(128, 64, 64, 1, 4, 6),
        gluon(128, 64, 64, 1, 4, 6, group=16),
        gluon(128, 64, 64, 1, 4, 5),
        gluon(64, 128, 64, 1, 4, 4),
        gluon(64, 64, 64, 1, 4, 6),
        tma(128, 128, 64, 1, 8, 4, 1),
        tma(128, 64, 64, 1, 4, 3, 2),
        tma(128, 64, 64, 1, 8, 5, 1),
        tma(64, 64, 64, 1, 4, 4, 2),
        tma(64, 128, 64, 1, 8, 4, 1),
        tma(64, 64, 128, 1, 4, 4, 1),
        tma(64, 32, 128, 1, 4, 4, 2),
        tma(64, 32, 64, 1, 4, 5, 3),
        tma(64, 16, 128, 1, 4, 4, 3),
        small(64, 64, 5),
        small(64, 64, 4),
        small(64, 128, 3),
        small(64, 128, 4),
        small(32, 64, 5),
        small(32, 128, 3),
        small(32, 128, 4),
        small(32, 256, 3),
        small(16, 128, 4),
        small(16, 256, 3),
        small(128, 64, 4, warps=8),
    ),
    "down": (
        Settings("pair"),
        small(64, 128, 4, 4),
        small(64, 128, 4, 2),
        small(64, 64, 5, 4),
        small(64, 128, 3, 6),
        small(32, 128, 4, 4),
        small(64, 64, 5, 2),
        small(32, 128, 4, 6),
        small(64, 128, 4, 8),
        small(32, 64, 5, 4),
        small(64, 128, 3, 4, warps=8),
        small(32, 128, 4, 3),
        small(16, 256, 3),
        small(64, 128, 3, 8, warps=8),
        small(128, 64, 4, 6, warps=8),
        small(64, 64, 5, 8),
        small(64, 64, 5, 12),
        small(32, 256, 3, 2),
    ),
    "glu_backward": (
        Settings("pair"),
        *_HIDDEN_BACKWARD_SMALL,
        gluon(128, 128, 64, 2, 4, 4),
        gluon(128, 128, 64, 4, 4, 4),
        gluon(128, 128, 64, 4, 4, 4, group=16),
        gluon(128, 128, 64, 4, 4, 5),
        gluon(64, 128, 64, 2, 4, 4),
        gluon(64, 128, 64, 4, 4, 4),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 4, 8, 4, 1),
        tma(128, 64, 64, 2, 4, 4, 2),
        tma(128, 64, 64, 4, 4, 4, 2),
        tma(128, 64, 64, 1, 8, 4, 1),
        tma(64, 128, 64, 2, 4, 4, 2),
        tma(64, 128, 64, 4, 4, 4, 2),
        tma(64, 64, 64, 1, 4, 4, 2),
        tma(64, 64, 64, 2, 4, 4, 3),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 32, 128, 1, 4, 4, 2),
    ),
    "glu_grads": _GROUPED,
    "glu_weight_grads": _GROUPED,
    "dgrad": (Settings("pair"), *_DX_SMALL),
    "dual_dgrad": (
        Settings("pair"),
        *_DX_SMALL,
        tma(128, 256, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 4, 3, 2),
        tma(128, 128, 128, 2, 8, 3, 1),
        tma(128, 64, 64, 1, 4, 4, 2),
        tma(128, 64, 128, 1, 4, 4, 1),
        tma(64, 128, 64, 1, 4, 4, 2),
        tma(64, 128, 128, 1, 4, 4, 1),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 64, 128, 1, 4, 6, 1),
        tma(64, 32, 128, 1, 4, 4, 2),
        tma(64, 16, 128, 1, 4, 5, 2),
        tma(256, 128, 64, 2, 8, 4, 1),
        tma(128, 256, 64, 1, 8, 3, 1),
    ),
    "linear_act": (
        Settings("pair"),
        small(64, 128, 4),
        small(64, 64, 5),
        small(32, 128, 4),
        small(128, 128, 3, warps=8),
        small(16, 256, 3),
        small(128, 64, 4, warps=8),
        gluon(128, 128, 64, 2, 4, 6),
        gluon(128, 256, 64, 4, 8, 4),
        gluon(128, 256, 64, 4, 8, 4, group=16),
        gluon(64, 128, 64, 2, 4, 6),
        tma(128, 256, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 4, 3, 2),
        tma(128, 64, 64, 1, 4, 4, 2),
        tma(64, 128, 64, 1, 4, 4, 2),
        tma(64, 64, 64, 1, 4, 4, 3),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 32, 128, 1, 4, 4, 2),
        tma(64, 16, 128, 1, 4, 4, 3),
    ),
    "act_backward": (
        Settings("pair"),
        *_HIDDEN_BACKWARD_SMALL,
        gluon(128, 128, 64, 2, 4, 4),
        gluon(128, 128, 64, 4, 4, 4),
        gluon(128, 128, 64, 4, 4, 5),
        gluon(128, 128, 64, 4, 4, 6),
        gluon(64, 128, 64, 2, 4, 4),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 4, 3, 2),
        tma(128, 64, 64, 2, 4, 4, 2),
        tma(128, 64, 64, 1, 4, 4, 2),
        tma(64, 128, 64, 2, 4, 4, 2),
        tma(64, 64, 64, 1, 4, 4, 3),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 32, 128, 1, 4, 4, 2),
    ),
}

CANDIDATES["linear_relu"] = CANDIDATES["linear_act"]

# Where TMA cannot serve: GPUs before 9.0, rows that are no multiple of 16 bytes, fp32.
POINTER_CANDIDATES = (
    pointer(128, 128, 32, 8, 3),
    pointer(128, 64, 32, 8, 3),
    pointer(128, 64, 64, 8, 3),
    pointer(64, 128, 32, 8, 3),
    pointer(64, 64, 64, 4, 3),
    pointer(64, 64, 32, 8, 3),
    pointer(64, 64, 32, 4, 3),
    pointer(64, 32, 32, 4, 3),
    pointer(64, 32, 64, 4, 3),
    pointer(32, 32, 64, 4, 3),
)

PASS = {
    "glu": "forward",
    "down": "forward",
    "linear_act": "forward",
    "linear_relu": "forward",
    "glu_backward": "backward",
    "glu_grads": "backward",
    "glu_weight_grads": "backward",
    "dual_dgrad": "backward",
    "dgrad": "backward",
    "act_backward": "backward",
}

GATED = ("glu", "down", "glu_backward", "dual_dgrad")
# The kernels that a layer tunes. Tables know no activations: gate and up of any gated layer share their rows.
LAYERS = {
    "geglu": GATED,
    "swiglu": GATED,
    "mlp": ("linear_act", "linear_relu", "down", "act_backward", "dgrad"),
    "linear": ("linear_act", "linear_relu"),
}
# As a row and a user name them: the dtype of the operands and the precision of an fp32 product.
DTYPES = {
    "bfloat16": (torch.bfloat16, ""),
    "float16": (torch.float16, ""),
    "float32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}


def sizes(op: str, D: int, H: int) -> tuple[int, int]:
    """``(N, K)``, the columns and the summed dimension, of one kernel of a layer D -> H."""
    return (D, H) if op in ("dual_dgrad", *PRODUCTS) else (H, D)


def candidates(op: str, M: int, tma: bool, gluon: bool) -> tuple[Settings, ...]:
    """What to measure for one kernel with M tokens. tma, gluon: whether those families can serve the operands here."""
    padded = 16 if M <= 16 else 32 if M <= 32 else 64
    found = []
    for candidate in CANDIDATES[op]:
        if candidate.family == "small":
            spills = op in HIDDEN_BACKWARD and padded == 64 and candidate.warps == 4
            if M <= SMALL_TOKENS[op] and not spills:
                found.append(replace(candidate, block_m=padded))
        elif candidate.family in ("pair", *(["tma"] if tma else []), *(["gluon"] if tma and gluon else [])):
            found.append(candidate)
    has_pointer = not tma and op not in (*PRODUCTS, *GLUON_ONLY_OPS)
    return (*found, *POINTER_CANDIDATES) if has_pointer else tuple(found)


@dataclass(frozen=True)
class Choice:
    """What the rule took, and the times (microseconds) that a table keeps of it.

    Attributes:
        settings: the chosen. us: its time.
        pair_us: of cuBLAS and a pointwise kernel; None where they were not measured.
        fused_us: of the fastest fused kernel, where the pair was chosen and one was measured; else None.
    """

    settings: Settings
    us: float
    pair_us: float | None = None
    fused_us: float | None = None

    def row(self) -> dict[str, Any]:
        """What a table keeps of it: the settings, and the times that there are."""
        times = {"us": self.us, "pair_us": self.pair_us, "fused_us": self.fused_us}
        return {"settings": asdict(self.settings), **{k: round(us, 3) for k, us in times.items() if us is not None}}


def must_save(op: str, tokens: int, fused_us: float) -> float:
    """Microseconds that the pair must save of the fastest fused kernel, for what its launches cost the host."""
    busy = fused_us >= BUSY[PASS.get(op, "backward")]
    if op in ALONE and tokens <= CUBLAS_TOKENS:
        return MUST_SAVE_OF_BUSY if busy else CUBLAS_MUST_SAVE
    if op in PAIR_IS_FREE:
        return 0.0
    if busy and tokens <= PAIR_MAY_SERVE_TOKENS:
        return MUST_SAVE_OF_BUSY
    if busy and op == "linear_act":
        return max(MUST_SAVE_OF_BUSY, PAIR_MUST_SAVE_SHARE * fused_us)
    return PAIR_MUST_SAVE


def choose(op: str, tokens: int, dtype: torch.dtype, measured: Sequence[tuple[Settings, float]]) -> Choice | None:
    """The fastest of the measured (settings, microseconds), in the candidates' order; None of none. Of kernels for
    small batches that are level it is the first: one that is hardly faster is not worth compiling one more.

    The pair must save what :func:`must_save` says. With more than :data:`PAIR_MAY_SERVE_TOKENS` it serves the ops of
    :data:`PAIR_MAY_SERVE` alone. In float32, where the heuristic takes it everywhere, it may serve every op.
    """
    fused = [(us, settings) for settings, us in measured if settings.family != "pair"]
    pairs = [(us, settings) for settings, us in measured if settings.family == "pair"]
    best = min(fused, key=lambda found: found[0], default=None)
    if best is not None and best[1].family == "small":
        best = next(found for found in fused if found[1].family == "small" and found[0] <= best[0] + LEVEL)
    pair = min(pairs, key=lambda found: found[0], default=None)
    pair_us = pair[0] if pair else None
    may_serve = op in PAIR_MAY_SERVE or tokens <= PAIR_MAY_SERVE_TOKENS or dtype == torch.float32
    if pair and may_serve and (best is None or pair[0] + must_save(op, tokens, best[0]) < best[0]):
        return Choice(pair[1], pair[0], pair[0], best[0] if best else None)
    return Choice(best[1], best[0], pair_us) if best else None
