"""fusedmlp.warmup where nothing is compiled: its arguments, its report, and layers that go PyTorch's way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fusedmlp
from fusedmlp import FusedGeGLUMLP, FusedLinearReLU, FusedMLP
from fusedmlp.integrations._dense_act import FusedDenseAct


@pytest.fixture
def layer() -> FusedGeGLUMLP:
    return gate_before_up()


def gate_before_up() -> FusedGeGLUMLP:
    """Layers are of one kind if gate and up lie in one order, which is the allocator's to choose: here gate first."""
    made = FusedGeGLUMLP(16, 32)
    gate, up = torch.randn(2, 32, 16)
    made.gate_proj.weight, made.up_proj.weight = nn.Parameter(gate), nn.Parameter(up)
    return made


@pytest.mark.parametrize(
    "counts, options, error, message",
    [
        (0, {}, ValueError, "at least 1 each, got 0"),
        ([4, -1], {}, ValueError, "at least 1 each, got -1"),
        ([], {}, ValueError, "token_counts is empty"),
        ([2.0], {}, TypeError, "must hold ints, got float: 2.0"),
        (True, {}, TypeError, "must hold ints, got bool"),
        ("16", {}, TypeError, "an int or ints, got str"),
        (None, {}, TypeError, "an int or ints, got NoneType"),
        (4, {"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype or None, got str"),
        (4, {"dtype": torch.int64}, ValueError, "floating-point type such as torch.bfloat16, got torch.int64"),
        (4, {"training": 1}, TypeError, "training must be True, False or None, got int"),
    ],
)
def test_wrong_arguments(layer, counts, options, error, message):
    with pytest.raises(error, match=message):
        fusedmlp.warmup(layer, counts, **options)


def test_a_module_without_a_fused_layer():
    with pytest.raises(ValueError, match=r"Linear has no fused layer.*fusedmlp.patch\(module\) first"):
        fusedmlp.warmup(nn.Linear(4, 4), 1)
    with pytest.raises(TypeError, match="must be an nn.Module, got function"):
        fusedmlp.warmup(lambda x: x, 1)


def test_inside_a_capture(layer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call it before the capture"):
        fusedmlp.warmup(layer, 1)


def test_the_report_says_what_goes_which_way(layer):
    model = nn.ModuleDict({"one": layer, "two": gate_before_up(), "three": FusedMLP(16, 8)})
    text = str(fusedmlp.warmup(model, iter([8, 1, 8]), training=False))
    reason = "eager, the tensors are on cpu; the kernels run on CUDA devices"
    lines = text.splitlines()
    assert lines[:4] == [
        f"one and 1 more: glu_mlp [8, 16 -> 32 -> 16] float32 ieee gelu_tanh, forward: {reason}",
        f"one and 1 more: glu_mlp [1, 16 -> 32 -> 16] float32 ieee gelu_tanh, forward: {reason}",
        f"three: mlp [8, 16 -> 8 -> 16] float32 ieee gelu, forward: {reason}",
        f"three: mlp [1, 16 -> 8 -> 16] float32 ieee gelu, forward: {reason}",
    ]
    assert len(lines) == 5 and lines[4].endswith(" s")


def test_training_follows_the_layer_unless_it_is_said(layer):
    model = nn.Sequential(layer, FusedGeGLUMLP(16, 32).eval())
    assert [p.training for p in fusedmlp.warmup(model, 2).prepared] == [True, False]
    assert [p.training for p in fusedmlp.warmup(model, 2, training=True).prepared] == [True, True]
    assert [p.training for p in fusedmlp.warmup(model, 2, training=False).prepared] == [False, False]


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x):
        raise AssertionError("called")


def test_layers_that_call_their_children_are_skipped(layer):
    layer.up_proj = Adapter(layer.up_proj)
    hooked = FusedMLP(16, 8)
    hooked.fc1.register_forward_hook(lambda *_: pytest.fail("called"))
    weighted = parametrizations.spectral_norm(FusedLinearReLU(16, 8))
    dense = FusedDenseAct(nn.Linear(16, 8), "gelu")
    model = nn.ModuleList([layer, hooked, weighted, dense])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    report = fusedmlp.warmup(model, 2)
    assert report.skipped == {
        "0": "up_proj is a Adapter, not a plain nn.Linear",
        "1": "fc1 has a forward hook",
        "2": "its weight is not a plain Parameter",
    }
    assert [p.layers for p in report.prepared] == [("3",)]
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert "1: skipped, fc1 has a forward hook" in str(report)


def test_global_hooks_skip_every_layer(layer):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: pytest.fail("called"))
    try:
        report = fusedmlp.warmup(layer, 2)
    finally:
        handle.remove()
    assert report.skipped == {"": "hooks are registered for every module"} and not report.prepared


def test_layers_that_differ_are_all_called():
    """In size, activation, a bias, the place of a bias, dtype, frozen weights, mode."""
    kinds = [
        FusedMLP(16, 8),
        FusedMLP(16, 24),
        FusedMLP(16, 8, activation="relu"),
        FusedMLP(16, 8, bias=(True, False)),
        FusedMLP(16, 8, bias=(False, True)),
        FusedMLP(16, 8, dtype=torch.bfloat16),
        FusedMLP(16, 8).requires_grad_(False),
        FusedMLP(16, 8).eval(),
        FusedMLP(16, 8, recompute=True),
    ]
    report = fusedmlp.warmup(nn.ModuleList(kinds), 2)
    assert [p.layers for p in report.prepared] == [(str(i),) for i in range(len(kinds))]
    assert [p.training for p in report.prepared] == [True] * 7 + [False, True]
