"""Gated MLPs that keep their hidden activation for backward: the default's gradients from the kept tensor."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.interpreter import repair
from support.memory import poisoned_memory
from support.operations import ACTIVATIONS
from torch import Tensor
from torch._dynamo import compiled_autograd

from fusedmlp import explain_plan, functional, ops, saving, settings
from fusedmlp.activations import resolve_activation
from fusedmlp.launchers import glu, glu_backward

repair()

D, H, D_OUT = 48, 72, 40
NAMES = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")
FAMILIES = ("pointer", "tma", "pair", "small")
KEEP = {"keep_activation": True}


@pytest.fixture(params=FAMILIES)
def family(request):
    with settings.override(family=request.param):
        yield request.param


def operands(*lead: int, dtype: torch.dtype = torch.bfloat16, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    shapes = dict(zip(NAMES, ((*lead, D), (H, D), (H, D), (D_OUT, H), (H,), (H,), (D_OUT,)), strict=True))
    made = {name: (torch.randn(shape) / (1 if name == "x" else 6)).to(dtype) for name, shape in shapes.items()}
    return {name: t.requires_grad_(name not in frozen) for name, t in made.items()}


def gradients(
    tensors: dict[str, Tensor], activation: str = "gelu_tanh", only: tuple[str, ...] = NAMES, **options: bool
) -> dict[str, Tensor]:
    with poisoned_memory():
        y = functional.glu_mlp(*tensors.values(), activation=activation, **options)
        gy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
        wanted = [name for name in only if tensors[name].requires_grad]
        found = torch.autograd.grad(y, [tensors[name] for name in wanted], gy)
    return {"y": y.detach()} | dict(zip(wanted, found, strict=True))


def assert_same_bits(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, right[name]), name
        assert tensor.isfinite().all()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_of_the_default(family, activation, dtype):
    """What backward makes again is what forward made: both start from gate and up as they are stored."""
    tensors = operands(21, dtype=dtype)
    assert_same_bits(gradients(tensors, activation, **KEEP), gradients(tensors, activation))


@pytest.mark.parametrize("lead", [(), (0,), (4, 0, 3), (1,), (3, 7)], ids=str)
def test_leading_dimensions(family, lead):
    tensors = operands(*lead)
    assert_same_bits(gradients(tensors, **KEEP), gradients(tensors))


@pytest.mark.parametrize(
    "frozen",
    [(name,) for name in NAMES] + [tuple(n for n in NAMES if n not in ("down", other)) for other in NAMES],
    ids=",".join,
)
def test_frozen_operands(family, frozen):
    """The last ones leave down's weight, alone or with one other."""
    tensors = operands(21, frozen=frozen)
    assert_same_bits(gradients(tensors, **KEEP), gradients(tensors))


@pytest.mark.parametrize("only", [("x",), ("down",), ("x", "down"), ("gate_bias",), ("down_bias",)], ids=",".join)
def test_gradients_of_some_after_a_forward_that_kept_for_all(family, only):
    tensors = operands(21)
    assert_same_bits(gradients(tensors, only=only, **KEEP), gradients(tensors, only=only))


@pytest.mark.parametrize("frozen", [(), ("x", "gate", "up", "gate_bias", "up_bias")], ids=["all", "down alone"])
def test_backward_neither_stores_nor_makes_it_again(family, frozen):
    asked = []
    original = glu_backward.glu_backward

    def spy(plan, gy, down_weight, gate_up, store_h, *rest):
        asked.append(store_h)
        return original(plan, gy, down_weight, gate_up, store_h, *rest)

    tensors = operands(21, frozen=frozen)
    y = functional.glu_mlp(*tensors.values(), **KEEP)
    with (
        mock.patch.object(glu_backward, "glu_backward", spy),
        mock.patch.object(glu, "glu_act", side_effect=AssertionError("made again")),
    ):
        y.float().sum().backward()
    assert asked == ([] if frozen else [False])


def test_the_kept_activation_is_what_gives_the_gradient_of_down():
    """Through hooks that replace it: nothing else may go into that product, and it into nothing else."""
    tensors = operands(21, dtype=torch.float32)
    expected = gradients(tensors, **KEEP)

    def twice_the_activation(t: Tensor) -> Tensor:
        return 2 * t if t.shape == (21, H) else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, twice_the_activation):
        found = gradients(tensors, **KEEP)
    expected["down"] = 2 * expected["down"]
    assert_same_bits(found, expected)


def test_hooks_that_hand_back_strided_copies(family):
    """Offloading may bring the kept tensors back with room between their rows, NaN in it, at odd addresses."""
    tensors = operands(21)

    def elsewhere(t: Tensor) -> Tensor:
        if t.dim() != 2:
            return t.clone()
        wide = torch.full((t.shape[0], t.shape[1] + 5), torch.nan, dtype=t.dtype)
        wide[:, 3:-2] = t
        return wide[:, 3:-2]

    expected = gradients(tensors, **KEEP)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, elsewhere):
        found = gradients(tensors, **KEEP)
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("retain_first", [True, False])
def test_double_backward_and_a_plain_one_of_one_graph(retain_first):
    """Either of them first: the plain one must find what was kept, whole."""
    tensors = operands(9, dtype=torch.float32)
    names = ("x", "down")

    def results(**options: bool) -> list[Tensor]:
        leaves = [tensors[name] for name in names]
        y = functional.glu_mlp(*tensors.values(), activation="silu", **options)
        loss = y.square().sum()
        found = list(torch.autograd.grad(loss, leaves, retain_graph=True)) if retain_first else []
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found += torch.autograd.grad(sum(g.square().sum() for g in first), leaves, retain_graph=True)
        return found + list(torch.autograd.grad(loss, leaves))

    for ours, right in zip(results(**KEEP), results(), strict=True):
        assert torch.equal(ours, right)


def test_compiled_autograd_sees_pytorchs_operations():
    tensors = operands(8, dtype=torch.float32)
    expected = gradients(tensors)
    gy = torch.linspace(-1, 1, expected["y"].numel(), dtype=torch.float64).view(expected["y"].shape).float()
    torch._dynamo.reset()
    y = functional.glu_mlp(*tensors.values(), activation="gelu_tanh", **KEEP)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(gy)
    for name, t in tensors.items():
        torch.testing.assert_close(t.grad, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", [saving.INPUT, saving.HIDDEN, saving.ACTIVATION])
@pytest.mark.parametrize("frozen", [(), ("down",), NAMES[:-1], NAMES], ids=["none", "down", "all but a bias", "all"])
def test_what_the_operator_returns_for_backward(save, frozen):
    """No more than backward has a use for: nothing for down's bias, no activation where down's weight is frozen."""
    tensors = operands(5, dtype=torch.float32, frozen=frozen)
    x, *rest = tensors.values()
    seen: list[list[Tensor]] = []
    original = torch.ops.fusedmlp.glu_mlp

    def operator(*args):
        seen.append(original(*args))
        return seen[0]

    with mock.patch.object(torch.ops.fusedmlp, "glu_mlp", operator):
        ops.call("glu_mlp", x, rest[:3], rest[3:], resolve_activation("silu"), save)
    useful = saving.INPUT if len(frozen) > 1 else saving.HIDDEN if frozen else saving.ACTIVATION
    widths = [[], [2 * H], [2 * H, H]][min(save, useful)]
    assert [tuple(t.shape) for t in seen[0]] == [(5, D_OUT), *((5, width) for width in widths)]


@pytest.mark.parametrize(
    "options, frozen, kept",
    [
        ({}, (), "x [21, 48], gate and up [21, 144]: 0.0 MiB"),
        (KEEP, (), "x [21, 48], gate and up [21, 144], activation [21, 72]: 0.0 MiB"),
        (KEEP, ("down",), "x [21, 48], gate and up [21, 144]: 0.0 MiB"),
        (KEEP, NAMES[:-1], "x [21, 48]: 0.0 MiB"),
        (KEEP, NAMES, "nothing"),
        ({"recompute": True}, (), "x [21, 48]: 0.0 MiB"),
    ],
    ids=str,
)
def test_explain_plan_says_what_is_kept(family, options, frozen, kept):
    tensors = operands(21, frozen=frozen)
    explained = explain_plan(functional.glu_mlp, *tensors.values(), **options)
    (note,) = explained.notes
    assert note.kept == kept and f"\n  kept for backward: {kept}" in str(explained)
    backward = "\n".join(note.backward)
    assert ("activation again" in backward) is (options != KEEP)
    assert ("up again" in backward) is ("recompute" in options)


def test_explain_plan_says_what_other_layers_keep():
    x, fc1 = torch.randn(1024, D).requires_grad_(), torch.randn(H, D)
    fc2 = torch.randn(D_OUT, H)
    for activation, what in (("relu", "result"), ("gelu", "input of the activation")):
        (note,) = explain_plan(functional.mlp, x, fc1, fc2, activation=activation).notes
        assert note.kept == f"x [1024, 48], {what} [1024, 72]: 0.5 MiB"
        (note,) = explain_plan(functional.linear_act, x, fc1, None, activation).notes
        assert note.kept == f"x [1024, 48], {what} [1024, 72]: 0.5 MiB"
    (note,) = explain_plan(functional.relu_mlp, x, [fc1, fc2], [None, None]).notes
    assert note.kept == "x [1024, 48], result of layer 0 [1024, 72], result of layer 1 [1024, 40]: 0.6 MiB"
    (note,) = explain_plan(functional.mlp, x, fc1, fc2, recompute=True).notes
    assert note.kept == "x [1024, 48]: 0.2 MiB" and note.backward[0].startswith("again: fc1")
    with torch.no_grad():
        (note,) = explain_plan(functional.mlp, x, fc1, fc2).notes
    assert note.kept == "nothing"
