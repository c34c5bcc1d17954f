"""Cases: pairwise-covering selections of shapes, widths, activations, biases, dtypes and layouts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .memory import GRADIENT_LAYOUTS, LAYOUTS, WEIGHT_LAYOUTS
from .operations import ACTIVATIONS, OPERATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BIASES = ("all", "none", "first", "last")
FROZEN = ("nothing", "weights", "x", "biases", "all_but_biases", "every_second")

# Leading shapes: 1-D, 2-D, 3-D and 4-D inputs, M from 0 to 1000.
FULL_LEADS = ((), (0,), (1,), (2,), (7,), (17,), (64,), (129,), (1000,), (4, 0, 3), (3, 43), (2, 1, 5, 7))
FULL_WIDTHS = (1, 3, 16, 31, 96, 130, 511, 1001)
LIGHT_LEADS = ((), (0,), (1,), (2,), (7,), (17,), (64,), (129,), (4, 0, 3), (3, 11), (2, 1, 5, 3))
LIGHT_WIDTHS = (1, 3, 16, 31, 96, 130)
SMALL_LEADS = ((), (0,), (1,), (2,), (17,), (65,), (3, 7), (2, 1, 2, 3))
SMALL_WIDTHS = (1, 3, 16, 31, 80)


@dataclass(frozen=True)
class Case:
    op: str
    lead: tuple[int, ...]
    widths: tuple[int, ...]
    activation: str = "relu"
    bias: str = "all"
    dtype: torch.dtype = torch.float32
    x_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    gradient_layout: str = "contiguous"
    frozen: str = "nothing"
    recompute: bool = False
    keep_activation: bool = False
    seed: int = 0

    def suits(self, family: str) -> bool:
        """Whether kernels of a forced family serve it, rather than those that take their place elsewhere."""
        if family == "small":
            return 0 < math.prod(self.lead) <= 64
        return family != "gluon" or self.dtype != torch.float32

    @property
    def id(self) -> str:
        parts = [
            self.op,
            "x".join(map(str, self.lead)) or "vector",
            "-".join(map(str, self.widths)),
            self.activation,
        ]
        parts += [f"bias_{self.bias}", str(self.dtype).removeprefix("torch.")]
        parts += [f"x_{self.x_layout}", f"w_{self.weight_layout}", f"gy_{self.gradient_layout}"]
        parts += [f"frozen_{self.frozen}", *self.options]
        return ",".join(parts)

    @property
    def options(self) -> dict[str, bool]:
        """What the call says of what is kept for backward."""
        return {name: True for name in ("recompute", "keep_activation") if getattr(self, name)}

    @property
    def rows(self) -> int:
        return math.prod(self.lead)

    def has_bias(self, index: int, count: int) -> bool:
        """Whether the projection at `index` of `count` has a bias."""
        return {"all": True, "none": False, "first": index == 0, "last": index == count - 1}[self.bias]

    def is_frozen(self, name: str, index: int) -> bool:
        """Whether the tensor `name`, the index-th of the call, does not require a gradient."""
        kind = "x" if name == "x" else "bias" if name.endswith("_bias") else "weight"
        return {
            "nothing": False,
            "weights": kind != "x",
            "x": kind == "x",
            "biases": kind == "bias",
            "all_but_biases": kind != "bias",
            "every_second": index % 2 == 1,
        }[self.frozen]


def pairwise(factors: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every pair of values of every two factors occurs; greedy and deterministic."""
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(factors[names[a]]))
        for j in range(len(factors[names[b]]))
    }
    rng, rows = random.Random(seed), []
    while missing:
        (a, i), (b, j) = min(missing)
        chosen = {a: i, b: j}
        rest = [f for f in range(len(names)) if f not in chosen]
        rng.shuffle(rest)
        for factor in rest:
            levels = list(range(len(factors[names[factor]])))
            rng.shuffle(levels)
            chosen[factor] = max(levels, key=lambda level: _gain(factor, level, chosen, missing))
        missing -= {(p, q) for p, q in itertools.combinations(sorted(chosen.items()), 2)}
        rows.append({names[f]: factors[names[f]][level] for f, level in chosen.items()})
    return rows


def _gain(factor: int, level: int, chosen: dict[int, int], missing: set) -> int:
    pairs = (tuple(sorted(((factor, level), other))) for other in chosen.items())
    return sum(pair in missing for pair in pairs)


def covering_cases(
    op: str, leads: Sequence[tuple[int, ...]], widths: Sequence[int], dtypes: Sequence[torch.dtype] = DTYPES
) -> list[Case]:
    """A pairwise-covering list of cases of one operation over all factors of `Case`."""
    operation = OPERATIONS[op]
    factors: dict[str, Sequence[Any]] = {"lead": leads}
    factors |= dict.fromkeys(operation.widths, widths)
    factors |= {
        "activation": ("relu",) if op == "relu_mlp" else tuple(ACTIVATIONS),
        "bias": BIASES if op != "linear_act" else BIASES[:2],
        "dtype": dtypes,
        "x_layout": LAYOUTS,
        "weight_layout": WEIGHT_LAYOUTS,
        "gradient_layout": GRADIENT_LAYOUTS,
        "frozen": FROZEN,
        "savings": operation.savings,
    }
    cases = []
    for seed, row in enumerate(pairwise(factors)):
        sizes = tuple(row.pop(name) for name in operation.widths)
        cases.append(Case(op=op, widths=sizes, seed=seed, **row.pop("savings"), **row))
    return cases
