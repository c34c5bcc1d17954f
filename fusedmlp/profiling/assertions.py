"""For tests: assert how many kernels a piece of code launches, and compare two modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .counts import LaunchCounts
from .launches import count_launches


def assert_launches(
    fn: Callable[[], Any],
    exactly: int | None = None,
    *,
    at_most: int | None = None,
    at_least: int | None = None,
    warmup: int = 3,
) -> LaunchCounts:
    """Assert how many kernels one steady call of ``fn()`` launches; copies and memsets do not count.

    Returns the counts. Raises AssertionError with the kernels by name where the number is another, ValueError where no
    bound is given, and what count_launches() raises.
    """
    if exactly is None and at_most is None and at_least is None:
        raise ValueError("assert_launches() needs a bound: a number, at_most= or at_least=")
    counts = count_launches(fn, warmup=warmup, allow_empty=True)
    wanted = [
        (exactly is None or counts.kernels == exactly, f"exactly {exactly}"),
        (at_most is None or counts.kernels <= at_most, f"at most {at_most}"),
        (at_least is None or counts.kernels >= at_least, f"at least {at_least}"),
    ]
    for holds, bound in wanted:
        if not holds:
            raise AssertionError(f"{bound} launches were expected; found {counts}")
    return counts


@dataclass(frozen=True)
class LaunchComparison:
    """Counts of two modules: the forward, and the training step (forward and backward), None where not asked for."""

    eager: LaunchCounts
    fused: LaunchCounts
    eager_step: LaunchCounts | None = None
    fused_step: LaunchCounts | None = None

    @property
    def saved(self) -> int:
        """Kernels that the forward has less."""
        return self.eager.kernels - self.fused.kernels

    @property
    def saved_step(self) -> int | None:
        """Kernels that the step has less."""
        if self.eager_step is None or self.fused_step is None:
            return None
        return self.eager_step.kernels - self.fused_step.kernels

    def __str__(self) -> str:
        parts = [f"forward {self.eager.kernels} -> {self.fused.kernels}"]
        if self.eager_step is not None and self.fused_step is not None:
            parts.append(f"step {self.eager_step.kernels} -> {self.fused_step.kernels}")
        return f"launches: {', '.join(parts)}"


def compare_launches(
    eager: Callable[..., Any], fused: Callable[..., Any], *inputs: Any, backward: bool = False, warmup: int = 3
) -> LaunchComparison:
    """Count the kernels of ``eager(*inputs)`` and ``fused(*inputs)``, and with ``backward`` of their training steps.

    In a step every output tensor that requires a gradient gets one of ones; gradients of the inputs and of
    parameters start as None and are None afterwards; random numbers and running statistics move on as in any call.
    Raises what count_launches() raises, and ValueError where ``backward`` is asked of outputs that require no gradient.
    """
    found = [count_launches(partial(call, *inputs), warmup=warmup) for call in (eager, fused)]
    if not backward:
        return LaunchComparison(*found)
    steps = [count_launches(training_step(call, *inputs), warmup=warmup) for call in (eager, fused)]
    return LaunchComparison(*found, *steps)


def training_step(call: Callable[..., Any], *inputs: Any, keywords: dict[str, Any] | None = None) -> Callable[[], None]:
    """A function that runs ``call(*inputs, **keywords)`` and its backward, down to the inputs, and leaves no gradients
    behind."""
    named = {name: _own(x) for name, x in (keywords or {}).items()}
    inputs = tuple(map(_own, inputs))
    # Known ahead, and completed by the graph: reentrant checkpoints hide from it what they compute.
    leaves = [x for x in tensors_in([*inputs, *named.values()]) if x.is_leaf]
    leaves += list(call.parameters()) if isinstance(call, nn.Module) else []
    ones: list[Tensor] = []

    def step() -> None:
        outputs = [y for y in tensors_in(call(*inputs, **named)) if y.requires_grad]
        if not outputs:
            raise ValueError("a training step needs an output that requires a gradient; none of these does")
        if [(o.shape, o.dtype, o.device) for o in ones] != [(y.shape, y.dtype, y.device) for y in outputs]:
            ones[:] = [torch.ones_like(y, requires_grad=False) for y in outputs]
            known = set(map(id, leaves))
            leaves.extend(leaf for leaf in _leaves(outputs) if id(leaf) not in known)
            for leaf in leaves:
                leaf.grad = None
        torch.autograd.backward(outputs, ones)
        for leaf in leaves:
            leaf.grad = None

    return step


def _own(value: Any) -> Any:
    """An input without the graph that it comes from, which a first backward would free."""
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach().requires_grad_()
    return value


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor that a backward of these outputs gives a gradient, whoever holds it."""
    found, seen = [y for y in outputs if y.is_leaf], set()
    nodes: list[Any] = [y.grad_fn for y in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes += [below for below, _ in node.next_functions]
    return found


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of a module's output: itself, or those within tuples, lists, dictionaries and model outputs."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [t for part in output for t in tensors_in(part)]
    return []
