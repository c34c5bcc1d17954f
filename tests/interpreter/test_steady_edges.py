"""Steady calls where a call is not like the one that was written down, or where it may not be written down."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.interpreter import repair
from support.steady_sim import Table, simulated
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp import plan as plans
from fusedmlp import record, reference, settings, steady
from fusedmlp.activations import resolve_activation
from fusedmlp.autograd import Call

repair()

D, H = 8, 16
GELU = resolve_activation("gelu")


def operands(seed: int, D: int = D, H: int = H) -> list[Tensor]:
    """x, fc1, fc2 and the biases of an MLP."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(3, D), (H, D), (D, H), (H,), (D,)]
    return [torch.randn(shape, generator=make).requires_grad_() for shape in shapes]


def fused(tensors: list[Tensor], **options: Any) -> Tensor:
    return fusedmlp.mlp(*tensors, **options)


def plain(tensors: list[Tensor]) -> Tensor:
    return reference.mlp(*tensors, GELU)


def gradients(tensors: list[Tensor], function: Any, runs: int = 1, **options: Any) -> list[Tensor]:
    y = function(tensors, **options)
    for i in range(runs):
        found = torch.autograd.grad(y, tensors, torch.cos(y).detach(), retain_graph=i + 1 < runs)
    return [y.detach(), *found]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def launcher():
    """Calls of an MLP are steady from here on."""
    with simulated() as made:
        for seed in range(3):
            gradients(operands(seed), fused)
        before = [p.runs for p in made.programs]
        gradients(operands(4), fused)
        assert len(before) == 2 and [p.runs - n for p, n in zip(made.programs, before)] == [1, 1]
        yield made


def test_tied_weights_after_others():
    with simulated() as made:
        for seed in range(3):
            gradients(operands(seed, D, D), fused)
        tied = operands(5, D, D)
        tied[2] = tied[1]
        before = made.programs[0].runs
        same(gradients(tied, fused), gradients(tied, plain))
        assert made.programs[0].runs == before + 1
        shared = operands(6, D, D)
        shared[2] = shared[1].view_as(shared[1])
        same(gradients(shared, fused), gradients(shared, plain))


def test_tied_weights_first():
    """Which of the two a step means cannot be told from such a call: no program is made of it."""
    with simulated() as made:
        for seed in range(4):
            tied = operands(seed, D, D)
            tied[2] = tied[1]
            same(gradients(tied, fused), gradients(tied, plain))
        assert not made.programs
        same(gradients(operands(5, D, D), fused), gradients(operands(5, D, D), plain))


def test_a_graph_is_used_again(launcher):
    same(gradients(operands(5), fused, runs=3), gradients(operands(5), plain))


def test_gradients_are_differentiated_again(launcher):
    def twice(function: Any) -> list[Tensor]:
        tensors = operands(5)
        first = torch.autograd.grad(function(tensors).square().sum(), tensors[:2], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), tensors[:3]))

    same(twice(fused), twice(plain))


def test_gradients_of_other_tensors_and_shapes(launcher):
    for wanted in ([0], [4], [1, 2]):
        for _ in range(3):
            tensors = operands(6)
            y = fused(tensors)
            found = torch.autograd.grad(y, [tensors[i] for i in wanted], torch.ones(()).expand_as(y))
            ours = operands(6)
            expected = torch.autograd.grad(plain(ours).sum(), [ours[i] for i in wanted])
            same(list(found), list(expected))


def test_saved_tensors_come_back_elsewhere(launcher):
    moved = [lambda t: t.clone(), lambda t: t.t().contiguous().t() if t.dim() == 2 else t]
    for move in moved:
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, move):
                same(gradients(operands(5), fused), gradients(operands(5), plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(launcher, reentrant):
    def found(tensors: list[Tensor], function: Any) -> Tensor:
        return checkpoint(lambda *t: function(list(t)), *tensors, use_reentrant=reentrant)

    def all_of(function: Any) -> list[Tensor]:
        tensors = operands(5)
        found(tensors, function).sum().backward()
        return [t.grad for t in tensors]

    same(all_of(fused), all_of(plain))


def test_a_bias_that_changed_before_its_backward():
    with simulated():
        for recompute in (False, True):
            for seed in range(3):
                gradients(operands(seed), fused, recompute=recompute)
            tensors = operands(5)
            y = fused(tensors, recompute=recompute)
            with torch.no_grad():
                tensors[3].add_(1)
            if recompute:
                with pytest.raises(RuntimeError, match="modified by an inplace operation: a bias of shape"):
                    y.sum().backward()
            else:
                y.sum().backward()


def test_the_result_and_weights_changed_in_place(launcher):
    tensors = operands(5)
    y = fused(tensors)
    y.mul_(2)
    found = torch.autograd.grad(y.sum(), tensors)
    ours = operands(5)
    same(list(found), list(torch.autograd.grad(2 * plain(ours).sum(), ours)))
    tensors = operands(5)
    y = fused(tensors)
    with torch.no_grad():
        tensors[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    tensors = operands(5)
    tensors[1].data = tensors[1].data * 2
    same(gradients(tensors, fused), gradients(tensors, plain))


def test_batched_gradients(launcher):
    def batched(function: Any) -> list[Tensor]:
        tensors = operands(5)
        y = function(tensors)
        return list(torch.autograd.grad(y, tensors, torch.stack([y.detach(), y.detach() + 1]), is_grads_batched=True))

    for _ in range(3):
        same(batched(fused), batched(plain))


def test_inference_and_no_gradients_share_programs():
    modes = [torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad]
    with simulated() as made:
        for seed, mode in enumerate(modes):
            tensors = [t.detach() for t in operands(seed)]
            with mode():
                y = fused(tensors)
                assert y.is_inference() == (mode is torch.inference_mode) and not y.requires_grad
                same([y], [plain(tensors)])
        assert [p.runs for p in made.programs] == [3]
        with torch.inference_mode():
            frozen = operands(0)[0].detach().clone()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                fused([frozen, *operands(0)[1:]])


def test_gradients_switched_off_and_on_and_hooked(launcher):
    def found(function: Any) -> list[Any]:
        seen: list[Any] = []
        for off in (1, 3, None):
            tensors = operands(7)
            if off is not None:
                tensors[off].requires_grad_(False)
            tensors[2].register_hook(lambda g: g * 3)
            y = function(tensors)
            y.register_hook(lambda g: g + 1)
            y.square().sum().backward()
            seen += [t.grad for t in tensors]
        return seen

    for _ in range(3):
        same(found(fused), found(plain))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside):
    def found(function: Any, seed: int) -> list[Any]:
        tensors = operands(seed)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(tensors)
            if inside:
                y.float().sum().backward()
        if not inside:
            y.float().sum().backward()
        return [y, *[t.grad for t in tensors]]

    with simulated() as made:
        for seed in range(4):
            ours, eager = found(fused, seed), found(plain, seed)
            assert [t.dtype for t in ours] == [torch.bfloat16] + [torch.float32] * 5
            torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.1)
        assert [p.runs for p in made.programs] == [2, 1]


def test_a_function_of_pytorch_is_replaced_while_it_is_written_down():
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func in (torch.addmm, torch.mm) else out

    with simulated() as made, torch.no_grad(), settings.override(family="pointer"):
        with Doubled():
            for seed in range(4):
                fused(operands(seed))
        assert not made.programs
        same([fused(operands(5))], [plain(operands(5))])
        with torch.device("cpu"):  # such a mode, which changes nothing
            for seed in range(3):
                same([fused(operands(seed))], [plain(operands(seed))])
        assert len(made.programs) == 1 and made.programs[0].runs == 3


def test_backward_in_a_mode_is_not_written_down():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with simulated() as made:
        for seed in range(5):
            y = fused(operands(seed))
            with Seen():
                y.sum().backward()
        assert len(made.programs) == 1  # the forward


def test_memory_for_the_call_but_not_for_its_record():
    with simulated() as made:
        failed = []

        def run() -> list[Tensor]:
            if record.current() is not None:
                failed.append(torch.empty(3))
                raise torch.OutOfMemoryError("none left")
            return [torch.ones(3)]

        x = operands(0)
        plan = plans.find("mlp", GELU, x[0], x[1:3], x[3:])
        assert steady.write_down(plan, run, x) is None and len(failed) == 1
        assert not steady.ripe(plan, "forward") and not steady.ripe(plan, "forward") and not made.programs


def test_what_no_table_knows_is_not_written_down_for_ever(monkeypatch):
    monkeypatch.setattr(Table, "add", lambda *args: False)
    with simulated() as made, torch.no_grad():
        for seed in range(2 * steady.MAX_ATTEMPTS):
            fused(operands(seed))
        assert len(made.programs) == steady.MAX_ATTEMPTS


def test_calls_leave_nothing_to_the_garbage_collector():
    """What they hold is free when they are: memory of tensors must not wait."""

    def left(*kinds: type) -> int:
        return sum(type(o) in kinds for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = left(Call, Tensor)
        for seed in range(3):
            fused(operands(seed)).sum().backward()
        assert left(Call, Tensor) == before
        with simulated() as made:
            for seed in range(3):
                fused(operands(seed)).sum().backward()
            made.seen = None
            assert len(made.programs) == 2 and left(record.Record) == 0
    finally:
        gc.enable()
