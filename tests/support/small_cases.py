"""Cases for the kernels for small batches, and how these are forced with other tiles and splits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from fusedmlp import plan, settings
from fusedmlp.settings import heuristic

from .cases import BIASES, DTYPES, Case
from .memory import LAYOUTS, WEIGHT_LAYOUTS
from .operations import ACTIVATIONS, OPERATIONS

CPU = torch.device("cpu")


@contextmanager
def forced_small(*ops: str | None, **fields: Any) -> Iterator[None]:
    """The family for these ops (None: every one that has it), with fields of its settings alone: other kernels keep
    theirs."""
    original = heuristic._small
    plan.clear()  # plans know of nothing but the overrides
    with mock.patch.object(heuristic, "_small", lambda *args: replace(original(*args), **fields)), ExitStack() as stack:
        for op in ops:
            stack.enter_context(settings.override(op, family="small"))
        yield
    plan.clear()


def varied(op: str, M: int, i: int, **fields: Any) -> Case:
    """Ragged and even widths, dtypes, biases, activations and layouts in turn."""
    widths = ((31, 130, 67, 48), (96, 80, 16, 24), (257, 48, 131, 20))[i % 3][: len(OPERATIONS[op].widths)]
    return Case(
        op,
        (M,),
        widths,
        "relu" if op == "relu_mlp" else tuple(ACTIVATIONS)[i % len(ACTIVATIONS)],
        BIASES[i % (2 if op == "linear_act" else 4)],
        DTYPES[(i // 2) % 3],
        LAYOUTS[i % len(LAYOUTS)],
        WEIGHT_LAYOUTS[i % len(WEIGHT_LAYOUTS)],
        **fields,
        seed=i,
    )
