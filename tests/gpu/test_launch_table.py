"""Every row of the table of launches, with and without biases, under autocast, compiled, and inside a CUDA graph.

Two sources have to agree on each: the profiler's records of what the device ran, and the nodes of the step captured
into a CUDA graph, in which no profiler has a part. As in test_launch_counts, the reductions of products that cuBLAS
splits along K are left out of what is compared with the table, of eager as of the fused layers; they are in both
sources.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from support.eager import EagerGLU
from torch import Tensor, nn

from fusedmlp import FusedGeGLUMLP, FusedLinearReLU, FusedMLP, FusedReLUMLP, FusedSwiGLUMLP
from fusedmlp.profiling import LaunchCounts, ProfilerError, count_launches, launches
from fusedmlp.profiling.graph_nodes import count_graph_nodes
from fusedmlp.profiling.names import decode

DTYPE = torch.bfloat16
TOKENS, HIDDEN, INTERMEDIATE = 8192, 768, 3072


def _geglu(bias: bool) -> tuple[nn.Module, nn.Module]:
    fused = FusedGeGLUMLP(HIDDEN, INTERMEDIATE, bias=bias)
    return fused, EagerGLU(fused, nn.GELU(approximate="tanh"))


def _swiglu(bias: bool) -> tuple[nn.Module, nn.Module]:
    fused = FusedSwiGLUMLP(HIDDEN, INTERMEDIATE, bias=bias)
    return fused, EagerGLU(fused, nn.SiLU())


def _linear_relu(bias: bool) -> tuple[nn.Module, nn.Module]:
    eager = nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE, bias=bias), nn.ReLU())
    return FusedLinearReLU.from_module(eager), eager


def _mlp(bias: bool) -> tuple[nn.Module, nn.Module]:
    fused = FusedMLP(HIDDEN, INTERMEDIATE, activation="gelu", bias=bias)
    return fused, nn.Sequential(fused.fc1, nn.GELU(), fused.fc2)


def _stack(bias: bool) -> tuple[nn.Module, nn.Module]:
    eager = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(1024, 1024, bias=bias), nn.ReLU())))
    return FusedReLUMLP.from_module(eager), eager


class Row(NamedTuple):
    """Kernels forward and backward: of eager, and at most of the fused layer."""

    make: Callable[[bool], tuple[nn.Module, nn.Module]]
    bias: bool
    eager: tuple[int, int]
    fused: tuple[int, int]
    tokens: int = TOKENS
    width: int = HIDDEN


TABLE = {
    "linear_relu bias": Row(_linear_relu, True, (2, 4), (1, 3)),
    "linear_relu": Row(_linear_relu, False, (2, 3), (1, 3)),
    "geglu": Row(_geglu, False, (5, 10), (2, 4)),
    "geglu bias": Row(_geglu, True, (5, 13), (2, 4)),
    "swiglu": Row(_swiglu, False, (5, 10), (2, 4)),
    "swiglu bias": Row(_swiglu, True, (5, 13), (2, 4)),
    "mlp bias": Row(_mlp, True, (3, 7), (2, 4)),
    "mlp": Row(_mlp, False, (3, 5), (2, 4)),
    "relu_stack bias": Row(_stack, True, (6, 12), (1, 7), 128, 1024),
    "relu_stack": Row(_stack, False, (6, 9), (1, 7), 128, 1024),
}


def _casts(name: str) -> bool:
    return decode(name).family == "copy"


def _plain(counts: LaunchCounts) -> list[str]:
    """The kernels that the table counts: without split-K reductions and casts."""
    return [n for n in counts.names if "splitKreduce_kernel" not in n and not _casts(n)]


class Passes:
    """The forward with gradients on and the whole step of a layer; gradients start as None in every step."""

    def __init__(self, layer: Callable[[Tensor], Tensor], row: Row, dtype: torch.dtype, autocast: bool = False) -> None:
        self.layer, self.autocast = layer, autocast
        self.x = torch.randn(row.tokens, row.width, device="cuda", dtype=dtype, requires_grad=True)
        self.dy = torch.randn_like(self.forward())
        self.parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []

    def _context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=DTYPE) if self.autocast else nullcontext()

    def forward(self) -> Tensor:
        with self._context():
            return self.layer(self.x)

    def step(self) -> None:
        torch.autograd.backward(self.forward(), self.dy)
        self.x.grad = None
        for p in self.parameters:
            p.grad = None

    def counts(self) -> tuple[LaunchCounts, LaunchCounts]:
        """Of forward and step, from the profiler, after the graph's nodes said the same."""
        found = []
        for call in (self.forward, self.step):
            counts, nodes = count_launches(call), count_graph_nodes(call)
            assert counts.source == "device"
            assert (counts.kernels, counts.memcpy, counts.memset) == (nodes.kernels, nodes.memcpy, nodes.memset), counts
            found.append(counts)
        return found[0], found[1]


def _made(name: str, dtype: torch.dtype = DTYPE) -> tuple[nn.Module, nn.Module, Row]:
    row = TABLE[name]
    fused, eager = row.make(row.bias)
    return fused.to("cuda", dtype), eager.to("cuda", dtype), row


def _forward_and_backward(forward: LaunchCounts, step: LaunchCounts) -> tuple[int, int]:
    return len(_plain(forward)), len(_plain(step)) - len(_plain(forward))


@pytest.mark.parametrize("name", TABLE)
def test_table_from_two_sources(name: str) -> None:
    fused, eager, row = _made(name)
    forward, step = Passes(fused, row, DTYPE).counts()
    ours = _forward_and_backward(forward, step)
    assert ours[0] == row.fused[0], forward
    assert ours[1] <= row.fused[1], step
    assert step.memcpy == 0 and not any(map(_casts, step.names)), step
    forward, step = Passes(eager, row, DTYPE).counts()
    if torch.cuda.get_device_capability() == (9, 0):
        assert _forward_and_backward(forward, step) == row.eager, step


@pytest.mark.parametrize("name", TABLE)
def test_table_under_autocast(name: str) -> None:
    """Parameters in float32: beside the casts, which are no more than eager's, the table holds."""
    fused, eager, row = _made(name, torch.float32)
    forward, step = Passes(fused, row, torch.float32, autocast=True).counts()
    ours = _forward_and_backward(forward, step)
    assert ours[0] == row.fused[0], forward
    assert ours[1] <= row.fused[1], step
    _, eager_step = Passes(eager, row, torch.float32, autocast=True).counts()
    assert sum(map(_casts, step.names)) <= sum(map(_casts, eager_step.names)), (step, eager_step)
    assert step.kernels < eager_step.kernels


@pytest.mark.parametrize("name", TABLE)
def test_table_under_compile(name: str) -> None:
    torch._dynamo.reset()
    fused, _, row = _made(name)
    compiled = torch.compile(fused, fullgraph=True)
    forward, step = Passes(compiled, row, DTYPE).counts()
    ours = _forward_and_backward(forward, step)
    assert ours[0] == row.fused[0], forward
    assert ours[1] <= row.fused[1], step


@pytest.mark.parametrize("name", TABLE)
def test_replays_of_a_graph_run_its_nodes(name: str) -> None:
    """What the device runs when a captured step is replayed is what it runs without a graph."""
    fused, _, row = _made(name)
    passes = Passes(fused, row, DTYPE)
    _, step = passes.counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes.step()
    replayed = count_launches(graph.replay)
    assert (replayed.kernels, replayed.memcpy) == (step.kernels, step.memcpy), (replayed, step)


def test_a_profiler_that_sees_nothing_fails_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a skip, and never a count of the host in its place."""
    launches._probe_name.cache_clear()
    monkeypatch.setattr(launches, "device_events", lambda events: [])
    y = torch.ones(10, device="cuda")
    with pytest.raises(ProfilerError, match="shows no kernels"):
        count_launches(lambda: y.add_(1))
    launches._probe_name.cache_clear()


def test_graph_nodes_count_kernels_copies_and_sets() -> None:
    a, b = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")

    def work() -> None:
        a.add_(1)
        b.copy_(a)
        b.mul_(2)
        torch.cuda.current_stream().record_event()

    found, counts = count_graph_nodes(work), count_launches(work)
    assert (found.kernels, found.memcpy) == (counts.kernels, counts.memcpy) == (2, 1)
