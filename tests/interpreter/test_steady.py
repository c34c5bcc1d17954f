"""Steady calls: the programs that calls are written down as compute what the long way does, from other tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import SMALL_LEADS, SMALL_WIDTHS, Case, covering_cases
from support.interpreter import repair
from support.operations import OPERATIONS
from support.runner import build, check_op, run
from support.steady_sim import simulated

from fusedmlp import plan, settings
from fusedmlp.record import Launched

repair()

FAMILIES = ("tma", "pointer", "pair", "small")
CASES = [case for op in OPERATIONS for case in covering_cases(op, SMALL_LEADS, SMALL_WIDTHS)]
# A family each, in turn, of those that serve the case.
PAIRS = [
    (case, ([f for f in FAMILIES if case.suits(f)])[i % (4 if case.suits("small") else 3)])
    for i, case in enumerate(CASES)
]


def warm_up(case: Case) -> None:
    """With other tensors: the first call compiles, the second forward and the third backward are written down."""
    operation = OPERATIONS[case.op]
    for seed in (1, 2, 3, 4):
        problem = build(replace(case, seed=case.seed + seed), "cpu")
        run(problem, lambda tensors: operation.fused(tensors, case.activation, **case.options))


@pytest.mark.parametrize("case, family", PAIRS, ids=lambda v: v.id if isinstance(v, Case) else v)
def test_accuracy(case, family):
    with settings.override(family=family), simulated() as launcher:
        warm_up(case)
        for _ in range(6):  # gate and up may lie in another order than before, which is another program
            before = sum(p.runs for p in launcher.programs)
            check_op(case, torch.device("cpu"))
            steady = sum(p.runs for p in launcher.programs) > before
            if steady:
                break
        alone = [r for r in launcher.refused if not any(isinstance(s, Launched) for s in r.steps)]
        assert launcher.refused == alone, "only what launches no kernel of ours is no program"
        eager = all(made.eager_reason is not None for made in plan._plans.values())
        assert eager or alone or steady
