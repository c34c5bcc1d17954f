"""Launches, asserted from profiles: the counter itself, the table of each layer, and what frozen tensors
save.

A count of a layer leaves out the reductions of a cuBLAS product that split K: cuBLAS decides on them by shape
and release, in eager and in the fused layers alike. They are printed beside the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.eager import EagerGLU
from torch import Tensor, nn

from fusedmlp import (
    FusedGeGLUMLP,
    FusedLinearReLU,
    FusedMLP,
    FusedReLUMLP,
    FusedSwiGLUMLP,
    count_launches,
    settings,
)
from fusedmlp.profiling import LaunchCounts, ProfilerError

DTYPE = torch.bfloat16
TOKENS, HIDDEN, INTERMEDIATE = 8192, 768, 3072


def _glu(cls: Any, bias: bool, act: nn.Module, **options: bool) -> tuple[nn.Module, nn.Module]:
    fused = cls(HIDDEN, INTERMEDIATE, bias=bias, **options)
    return fused, EagerGLU(fused, act)


def _linear_relu() -> tuple[nn.Module, nn.Module]:
    eager = nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE), nn.ReLU())
    return FusedLinearReLU.from_module(eager), eager


def _mlp() -> tuple[nn.Module, nn.Module]:
    fused = FusedMLP(HIDDEN, INTERMEDIATE, activation="gelu", bias=True)
    return fused, nn.Sequential(fused.fc1, nn.GELU(), fused.fc2)


def _stack() -> tuple[nn.Module, nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    eager = nn.Sequential(*layers)
    return FusedReLUMLP.from_module(eager), eager


class Row(NamedTuple):
    """Kernels of a layer, eager and fused, forward and backward; ``gemms``: the dW products of a backward."""

    make: Callable[[], tuple[nn.Module, nn.Module]]
    tokens: int
    width: int
    eager: tuple[int, int]
    fused: tuple[int, int]
    at_most: bool  # the backward of the fused layer may have fewer
    gemms: int


TANH = nn.GELU(approximate="tanh")
KEEP = {"keep_activation": True}
TABLE = {
    "linear_relu": Row(_linear_relu, TOKENS, HIDDEN, (2, 4), (1, 3), True, 1),
    "geglu": Row(lambda: _glu(FusedGeGLUMLP, False, TANH), TOKENS, HIDDEN, (5, 10), (2, 4), False, 2),
    "swiglu": Row(lambda: _glu(FusedSwiGLUMLP, False, nn.SiLU()), TOKENS, HIDDEN, (5, 10), (2, 4), False, 2),
    "geglu_bias": Row(lambda: _glu(FusedGeGLUMLP, True, TANH), TOKENS, HIDDEN, (5, 13), (2, 4), False, 2),
    "swiglu_bias": Row(lambda: _glu(FusedSwiGLUMLP, True, nn.SiLU()), TOKENS, HIDDEN, (5, 13), (2, 4), False, 2),
    "geglu_keep": Row(lambda: _glu(FusedGeGLUMLP, False, TANH, **KEEP), TOKENS, HIDDEN, (5, 10), (2, 4), False, 2),
    "geglu_bias_keep": Row(lambda: _glu(FusedGeGLUMLP, True, TANH, **KEEP), TOKENS, HIDDEN, (5, 13), (2, 4), False, 2),
    "mlp": Row(_mlp, TOKENS, HIDDEN, (3, 7), (2, 4), False, 2),
    "relu_stack": Row(_stack, 128, 1024, (6, 12), (1, 7), True, 3),
}


class Counted(NamedTuple):
    """Kernels without the reductions of split products, and those reductions."""

    kernels: int
    split: int
    counts: LaunchCounts


def _counted(fn: Callable[[], Any]) -> Counted:
    counts = count_launches(fn)
    split = sum("splitKreduce_kernel" in name for name in counts.names)
    return Counted(counts.kernels - split, split, counts)


def _passes(layer: nn.Module, x: Tensor) -> tuple[Counted, Counted]:
    """(forward with gradients on, whole step) of a layer; the gradients start as None in every step."""
    dy = torch.randn_like(layer(x))

    def step() -> None:
        torch.autograd.backward(layer(x), dy)
        x.grad = None
        layer.zero_grad(set_to_none=True)

    return _counted(lambda: layer(x)), _counted(step)


def _made(row: Row) -> tuple[nn.Module, nn.Module, Tensor]:
    fused, eager = row.make()
    fused.to("cuda", DTYPE)
    eager.to("cuda", DTYPE)
    return fused, eager, torch.randn(row.tokens, row.width, device="cuda", dtype=DTYPE, requires_grad=True)


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = TABLE[name]
    fused, eager, x = _made(row)
    found = {}
    for kind, layer in (("eager", eager), ("fused", fused)):
        forward, step = _passes(layer, x)
        found[kind] = forward.kernels, step.kernels - forward.kernels
        with capsys.disabled():
            print(f"\n{name} {kind}: forward {found[kind][0]}, backward {found[kind][1]}", end="")
            print(f"; split-K reductions {forward.split}, {step.split - forward.split}", end="")
        if kind == "fused":
            assert (step.counts.memcpy, forward.counts.memcpy) == (0, 0), step.counts
            assert forward.kernels == row.fused[0], forward.counts
            backward = step.kernels - forward.kernels
            assert backward <= row.fused[1] if row.at_most else backward == row.fused[1], step.counts
    assert sum(found["fused"]) < sum(found["eager"])
    if torch.cuda.get_device_capability() == (9, 0):
        assert found["eager"] == row.eager


@pytest.mark.parametrize("name", TABLE)
def test_frozen_tensors_cost_no_kernel(name: str) -> None:
    row = TABLE[name]
    fused, _, x = _made(row)
    forward, step = _passes(fused, x)
    full = step.kernels - forward.kernels

    x.requires_grad_(False)
    forward, step = _passes(fused, x)
    assert step.kernels - forward.kernels <= full - 1, step.counts  # no dX product
    assert x.grad is None

    x.requires_grad_(True)
    fused.requires_grad_(False)
    forward, step = _passes(fused, x)
    frozen = step.kernels - forward.kernels
    assert frozen <= full - row.gemms, step.counts  # no dW product
    torch.autograd.backward(fused(x), torch.ones_like(fused(x)))
    assert x.grad is not None
    assert all(p.grad is None for p in fused.parameters())


@pytest.mark.parametrize("cls", [FusedGeGLUMLP, FusedSwiGLUMLP])
def test_frozen_biases_reduce_nothing(cls: Any) -> None:
    """With every parameter frozen a layer with biases runs the same kernels as one without: dH and dX."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=DTYPE, requires_grad=True)
    backwards = []
    for bias in (False, True):
        layer = cls(HIDDEN, INTERMEDIATE, bias=bias, device="cuda", dtype=DTYPE).requires_grad_(False)
        forward, step = _passes(layer, x)
        backwards.append(step.kernels - forward.kernels)
    assert backwards == [2, 2]


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the grouped launch is a kernel for compute capability 9.x")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("options", [{}, KEEP], ids=str)
@pytest.mark.parametrize("cls", [FusedGeGLUMLP, FusedSwiGLUMLP])
def test_grouped_products_make_a_step_of_four_launches(cls: Any, options: dict[str, bool]) -> None:
    """Two forward; backward the hidden kernel, and one launch for dX, dWgate, dWup and dWdown."""
    layer = cls(HIDDEN, INTERMEDIATE, device="cuda", dtype=DTYPE, **options)
    x = torch.randn(1024, HIDDEN, device="cuda", dtype=DTYPE, requires_grad=True)
    with settings.override(family="gluon"):
        forward, step = _passes(layer, x)
    assert (forward.kernels, step.kernels) == (2, 4), step.counts
    assert step.split == forward.split, step.counts  # no cuBLAS product is left in backward
    assert step.counts.memcpy == 0, step.counts


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens, launches", [(16, 5), (40, 4), (128, 4), (500, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_make_a_step_of_four_or_five_launches(tokens: int, launches: int, bias: bool) -> None:
    """Two forward; backward the hidden kernel, and one launch for dX, dWgate, dWup and dWdown, or two: of up to 32
    tokens dX has a kernel for small batches."""
    layer = FusedGeGLUMLP(HIDDEN, INTERMEDIATE, bias=bias, device="cuda", dtype=DTYPE)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=DTYPE, requires_grad=True)
    forward, step = _passes(layer, x)
    assert (forward.kernels, step.kernels) == (2, launches), step.counts


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("bias", [False, True])
def test_with_few_tokens_all_weights_gradients_of_a_wide_layer_are_one_launch(bias: bool) -> None:
    """Two forward; backward the hidden kernel, dX, and all of dW."""
    layer = FusedGeGLUMLP(1280, 5120, bias=bias, device="cuda", dtype=DTYPE)
    x = torch.randn(128, 1280, device="cuda", dtype=DTYPE, requires_grad=True)
    forward, step = _passes(layer, x)
    assert (forward.kernels, step.kernels) == (2, 5), step.counts


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize("bias", [False, True])
def test_two_layers_make_a_step_of_four_launches(tokens: int, bias: bool) -> None:
    """Two forward; backward the hidden kernel, and one launch for dX, dW1 and dW2."""
    layer = FusedMLP(HIDDEN, INTERMEDIATE, bias=bias, device="cuda", dtype=DTYPE)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=DTYPE, requires_grad=True)
    forward, step = _passes(layer, x)
    assert (forward.kernels, step.kernels) == (2, 4), step.counts


def test_no_grad_forward_is_no_longer_than_one_with_gradients() -> None:
    fused, _, x = _made(TABLE["geglu"])
    with torch.no_grad():
        assert _counted(lambda: fused(x)).kernels == 2


# ------------------------------------------------------------------------------- the counter itself


def test_counts_kernels_copies_and_sets() -> None:
    a = torch.ones(1000, device="cuda")
    b = torch.ones(1000, device="cuda")
    host = torch.ones(1000)

    def work() -> None:
        a.add_(1)
        a.mul_(2)
        b.copy_(a)
        b.copy_(host)
        torch.cuda.current_stream().synchronize()

    counts = count_launches(work)
    assert (counts.kernels, counts.memcpy) == (2, 2), counts
    assert len(counts.names) == 2 and sum(counts.by_name.values()) == 2
    assert counts.kernel_us > 0
    assert count_launches(work, steps=4).kernels == 2


def test_sees_the_backward_thread_graphs_and_side_streams() -> None:
    x = torch.ones(1000, device="cuda", requires_grad=True)

    def backward() -> None:
        (g,) = torch.autograd.grad(x.exp(), x, torch.ones_like(x))

    assert count_launches(backward).kernels == 3  # exp, ones, product
    y = torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()

    def aside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        y.add_(1)

    assert count_launches(aside).kernels == 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            y.add_(1)
    assert count_launches(graph.replay).kernels == 5


def test_ranges_are_not_kernels_and_the_context_manager_counts() -> None:
    y = torch.ones(1000, device="cuda")
    y.add_(1)
    with count_launches() as c:
        with torch.profiler.record_function("a range"):
            y.add_(1)
    assert (c.kernels, c.memcpy, c.memset) == (1, 0, 0)
    assert "a range" not in c.names


def test_nothing_on_the_device_raises() -> None:
    cpu = torch.ones(10)
    with pytest.raises(ProfilerError, match="Are the tensors on the GPU"):
        count_launches(lambda: cpu.add_(1))
    assert count_launches(lambda: cpu.add_(1), allow_empty=True).kernels == 0
    with pytest.raises(ProfilerError, match="allow_empty"):
        with count_launches():
            cpu.add_(1)


def test_calls_that_differ_raise() -> None:
    y = torch.ones(1000, device="cuda")
    calls = []

    def growing() -> None:
        calls.append(1)
        for _ in range(len(calls)):
            y.add_(1)

    with pytest.raises(ProfilerError, match="alike|differ"):
        count_launches(growing, warmup=0, steps=2)


def test_another_profiler_is_named() -> None:
    y = torch.ones(10, device="cuda")
    count_launches(lambda: y.add_(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        with pytest.raises(ProfilerError, match="another profiler"):
            count_launches(lambda: y.add_(1))
