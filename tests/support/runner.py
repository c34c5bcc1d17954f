"""Runs one case three ways (fp64, eager in the dtype, fused) and applies the accuracy rule to the results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .compare import PLENTY, InaccurateError, assert_matches
from .memory import View, place, poisoned_memory, unchanged
from .operations import OPERATIONS, Operation, Tensors


@dataclass
class Problem:
    """The tensors of one case: leaves as they lie in memory, and the view of each that the operation gets."""

    leaves: dict[str, Tensor | None] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    requires: dict[str, bool] = field(default_factory=dict)
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Outcome:
    output: Tensor
    gradients: dict[str, Tensor | None]


def build(case: Case, device: torch.device | str) -> Problem:
    """Tensors of a case, alike on all devices: x, gy ~ N(0, 1), weights ~ N(0, 1/K), biases ~ N(0, 1/4)."""
    operation, problem = OPERATIONS[case.op], Problem()
    generator = torch.Generator().manual_seed(case.seed)

    def random(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, case.dtype)

    shapes = {"x": (*case.lead, case.widths[0])} | operation.shapes(case.widths)
    count = len(shapes) // 2
    for index, (name, shape) in enumerate(shapes.items()):
        is_bias = name.endswith("_bias")
        scale = 1.0 if name == "x" else 0.5 if is_bias else 1 / math.sqrt(shape[-1])
        values = random(shape, scale)
        layout = case.x_layout if name == "x" else case.weight_layout
        present = not is_bias or case.has_bias(index // 2 - 1, count)
        leaf, view = place(values, layout)
        problem.leaves[name] = leaf if present else None
        problem.views[name] = view
        problem.requires[name] = present and not case.is_frozen(name, index)
    leaf, view = place(random((*case.lead, case.widths[-1]), 1.0), case.gradient_layout)
    problem.gradient = view(leaf)
    return problem


def run(problem: Problem, function: Callable[[Tensors], Tensor], dtype: torch.dtype | None = None) -> Outcome:
    """Forward and backward on the leaves themselves, or on copies of them in `dtype`."""
    leaves: dict[str, Tensor | None] = {}
    for name, leaf in problem.leaves.items():
        if leaf is not None:
            leaf = leaf.detach() if dtype is None else leaf.detach().clone().to(dtype)
            leaf.requires_grad_(problem.requires[name])
        leaves[name] = leaf
    output = function({name: None if leaf is None else problem.views[name](leaf) for name, leaf in leaves.items()})
    if output.requires_grad:
        output.backward(problem.gradient if dtype is None else problem.gradient.to(dtype))
    return Outcome(output.detach(), {n: None if t is None else t.grad for n, t in leaves.items()})


def run_tensors(leaves: Tensors, dtype: torch.dtype, loss: Callable[[Tensors], Tensor]) -> Outcome:
    """loss(copies of the leaves in dtype) and its backward; every leaf requires a gradient."""
    copies = {n: None if t is None else t.detach().clone().to(dtype).requires_grad_() for n, t in leaves.items()}
    value = loss(copies)
    value.backward()
    return Outcome(value.detach(), {n: None if t is None else t.grad for n, t in copies.items()})


def roundings(case: Case, operation: Operation) -> int:
    """Independent roundings behind the results: the smallest of the arrays that are rounded on the way."""
    repeated = case.x_layout == "expand" and len(case.lead) > 0 or case.gradient_layout in ("scalar", "per_column")
    rows = min(case.rows, 1) if repeated else case.rows
    widths = list(operation.hidden(*case.widths))
    return rows * min(1 if case.gradient_layout in ("scalar", "per_row") else widths[-1], *widths)


def compare(name: str, ours: Outcome, eager: Outcome, exact: Outcome, **options: Any) -> None:
    """The accuracy rule for the output and every gradient of one outcome."""
    assert_matches(f"{name}: output", ours.output, eager.output, exact.output, **options)
    for leaf, mine in ours.gradients.items():
        theirs, wanted = eager.gradients[leaf], exact.gradients[leaf]
        assert_matches(f"{name}: gradient of {leaf}", mine, theirs, wanted, **options)


def check_op(
    case: Case, device: torch.device | str, fused: Callable[[Tensors], Tensor] | None = None, **options: Any
) -> None:
    """The accuracy rule for output, dx and every dW and db of a case; AssertionError says which tensor breaks
    it.

    In a small 16-bit case one ReLU whose input lies at zero, flipped by a legal rounding, moves a gradient
    far; so such a case fails on accuracy only if it fails with each of three seeds. All else fails at once.
    """
    small = roundings(case, OPERATIONS[case.op]) < PLENTY and case.dtype is not torch.float32
    for seed in (case.seed, case.seed + 1000) if small else ():
        try:
            _check_once(replace(case, seed=seed), device, fused, **options)
            return
        except InaccurateError:
            pass
    _check_once(replace(case, seed=case.seed + 2000) if small else case, device, fused, **options)


def _check_once(
    case: Case, device: torch.device | str, fused: Callable[[Tensors], Tensor] | None, **options: Any
) -> None:
    """One seed of a case. Ours runs with NaN in all fresh memory; every storage that it was given (inputs,
    weights, gy and the bytes around them) must come back unchanged, bit for bit. `fused` replaces the call,
    for planted variants.
    """
    operation = OPERATIONS[case.op]
    if fused is None:

        def fused(tensors: Tensors) -> Tensor:
            return operation.fused(tensors, case.activation, **case.options)

    def plain(tensors: Tensors) -> Tensor:
        return operation.plain(tensors, case.activation)

    problem = build(case, device)
    exact = run(problem, plain, torch.float64)
    eager = run(problem, plain, case.dtype)
    given = {name: leaf for name, leaf in problem.leaves.items() if leaf is not None}
    with unchanged(given | {"gy": problem.gradient}), poisoned_memory():
        ours = run(problem, fused)
    compare(case.id, ours, eager, exact, roundings=roundings(case, operation), **options)
