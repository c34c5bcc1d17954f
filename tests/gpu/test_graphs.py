"""CUDA graphs: captures of sizes that were never run, whole training steps, replays with other numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.loads import loads
from torch import Tensor, nn

import fusedmlp

pytestmark = pytest.mark.gpu

WIDTH, HIDDEN, DTYPE = 256, 512, torch.bfloat16
MOST = 2e-2
ACTS = {"gelu_tanh": nn.GELU(approximate="tanh"), "gelu": nn.GELU(), "relu": nn.ReLU()}


class Eager(nn.Module):
    """A gated MLP of PyTorch's operations over the Linears of ours."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = fused.gate_proj, fused.up_proj, fused.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTS["gelu_tanh"](self.gate_proj(x)) * self.up_proj(x))


def _glu(bias: bool) -> tuple[nn.Module, nn.Module]:
    fused = fusedmlp.FusedGeGLUMLP(WIDTH, HIDDEN, bias=bias, device="cuda", dtype=DTYPE)
    return fused, Eager(fused)


def _mlp() -> tuple[nn.Module, nn.Module]:
    fused = fusedmlp.FusedMLP(WIDTH, HIDDEN, device="cuda", dtype=DTYPE)
    return fused, nn.Sequential(fused.fc1, ACTS["gelu"], fused.fc2)


def _stack() -> tuple[nn.Module, nn.Module]:
    fused = fusedmlp.FusedReLUMLP([WIDTH, WIDTH, WIDTH], device="cuda", dtype=DTYPE)
    linears = [m for m in fused.modules() if isinstance(m, nn.Linear)]
    return fused, nn.Sequential(linears[0], ACTS["relu"], linears[1], ACTS["relu"])


MAKE: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "geglu": lambda: _glu(False),
    "geglu_bias": lambda: _glu(True),
    "mlp": _mlp,
    "stack": _stack,
}
SIZES = [1, 12, 37, 200, 1024, 1500]


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    x, gy = (torch.randn(tokens, WIDTH, device="cuda", dtype=DTYPE) for _ in range(2))
    return x, gy


def step(layer: nn.Module, x: Tensor, gy: Tensor) -> list[Tensor]:
    """The output and all gradients, x's first."""
    y = layer(x)
    leaves = [x, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, gy)]


def run_another_size(layer: nn.Module, eager: nn.Module, training: bool) -> None:
    """What PyTorch asks for before a capture: cuBLAS has been used, on the side."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for module in (layer, eager):
            x, gy = inputs(64)
            with torch.set_grad_enabled(training):
                module(x)
                if training:
                    step(module, x.requires_grad_(), gy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit: a graph holds the kernels that run outside one."""
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)


def close(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    """To eager's. Of a ReLU stack the output alone: where rounding flips a mask, a gradient differs by what it is."""
    if name == "stack":
        found, expected = found[:1], expected[:1]
    for i, (ours, right) in enumerate(zip(found, expected, strict=True)):
        error = relative_error(ours, right)
        assert error <= MOST, f"tensor {i}: relative error {error:.1e}"


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("name", MAKE)
def test_forward_of_a_size_never_run(name: str, tokens: int) -> None:
    layer, eager = MAKE[name]()
    run_another_size(layer, eager, training=False)
    x, _ = inputs(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            x.copy_(inputs(tokens)[0])
            graph.replay()
            close(name, [y], [eager(x)])
            same([y], [layer(x)])


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("name", MAKE)
def test_training_step_of_a_size_never_run(name: str, tokens: int) -> None:
    layer, eager = MAKE[name]()
    run_another_size(layer, eager, training=True)
    x, gy = inputs(tokens)
    x.requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(layer, x, gy)
    for _ in range(3):
        with torch.no_grad():
            for old, new in zip((x, gy), inputs(tokens), strict=True):
                old.copy_(new)
        graph.replay()
        close(name, found, step(eager, x, gy))
        same(found, step(layer, x, gy))


def test_a_whole_training_loop_follows_eagers() -> None:
    """Forward, loss, backward and the optimiser's step in one graph."""
    layer, twin = (fusedmlp.FusedGeGLUMLP(WIDTH, HIDDEN, bias=True, device="cuda") for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    start = [p.detach().clone() for p in layer.parameters()]
    x, target = (torch.randn(48, WIDTH, device="cuda") for _ in range(2))

    def trainer(module: nn.Module) -> Callable[[], None]:
        optimiser = torch.optim.SGD(module.parameters(), lr=0.5)

        def once() -> None:
            optimiser.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(module(x), target).backward()
            optimiser.step()

        return once

    ours, theirs = trainer(layer), trainer(Eager(twin))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours()
    torch.cuda.current_stream().wait_stream(side)
    theirs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours()
    for _ in range(5):
        for t in (x, target):
            t.copy_(torch.randn_like(t))
        graph.replay()
        theirs()
    for before, mine, right in zip(start, layer.parameters(), twin.parameters(), strict=True):
        moved = relative_error(mine - before, right - before)
        assert moved < 1e-3, f"relative error {moved:.1e} of what six steps changed"


@pytest.mark.parametrize("name", MAKE)
def test_make_graphed_callables(name: str) -> None:
    layer, eager = MAKE[name]()
    run_another_size(layer, eager, training=True)
    sample, _ = inputs(24)
    graphed = torch.cuda.make_graphed_callables(layer, (sample.requires_grad_(),))
    for _ in range(3):
        x, gy = inputs(24)
        x.requires_grad_()
        close(name, step(graphed, x, gy), step(eager, x.detach().requires_grad_(), gy))


@pytest.mark.parametrize("training", [False, True])
def test_reduce_overhead_of_sizes_never_run(training: bool) -> None:
    torch._dynamo.reset()
    layer, eager = _glu(True)
    compiled = torch.compile(layer, mode="reduce-overhead", dynamic=False)
    for tokens in (20, 300, 20):
        for _ in range(3):  # warm-up, capture, replay
            x, gy = inputs(tokens)
            torch.compiler.cudagraph_mark_step_begin()
            if training:
                found = [t.clone() for t in step(compiled, x.requires_grad_(), gy)]
                close("geglu", found, step(eager, x.detach().requires_grad_(), gy))
            else:
                with torch.no_grad():
                    close("geglu", [compiled(x).clone()], [eager(x)])


@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_loaded_in_a_capture_after_warmup(name: str) -> None:
    layer, eager = MAKE[name]()
    run_another_size(layer, eager, training=True)
    fusedmlp.warmup(layer, [45, 333], training=True)
    for tokens in (45, 333):
        x, gy = inputs(tokens)
        x.requires_grad_()
        graph = torch.cuda.CUDAGraph()
        with loads() as loaded, torch.cuda.graph(graph):
            found = step(layer, x, gy)
        assert loaded == []
        graph.replay()
        close(name, found, step(eager, x, gy))


def test_graphs_replayed_beside_each_other() -> None:
    """Kernels with grid barriers: each captured one counts for itself."""
    layer, eager = _stack()
    run_another_size(layer, eager, training=False)
    xs = [inputs(96)[0] for _ in range(2)]
    graphs, ys = [torch.cuda.CUDAGraph() for _ in xs], []
    with torch.no_grad():
        for graph, x in zip(graphs, xs, strict=True):
            with torch.cuda.graph(graph):
                ys.append(layer(x))
        expected = [layer(x) for x in xs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in xs]
        for _ in range(50):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
    same(ys, expected)


FRESH = """
import torch, fusedmlp
from support.loads import loads
torch.manual_seed(0)
layer = fusedmlp.FusedGeGLUMLP(256, 512, bias=True, device="cuda", dtype=torch.bfloat16)
x, gy = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
layer(x.requires_grad_()).backward(gy)
# PyTorch's own rule: cuBLAS is in use in both threads before a capture.
torch.nn.functional.linear(x, torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
torch.cuda.synchronize()
x, gy = (torch.randn(3000, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
x.requires_grad_()
graph = torch.cuda.CUDAGraph()
with loads() as found, torch.cuda.graph(graph):
    y = layer(x)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], gy)
assert found, "the capture found every kernel loaded: the test does not test what it says"
graph.replay()
torch.cuda.synchronize()
for mine, right in zip(grads, torch.autograd.grad(layer(x), [x, *layer.parameters()], gy)):
    assert torch.equal(mine, right)
print("captured with", len(found), "kernels loaded inside")
"""


@pytest.mark.parametrize("launcher", ["", "triton"])
def test_kernels_are_loaded_inside_a_capture(launcher: str) -> None:
    """In a process of its own, in which no kernel for such a size is loaded, by both launchers."""
    tests = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "FUSEDMLP_LAUNCHER": launcher, "FUSEDMLP_SETTINGS": ""}
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels loaded inside" in done.stdout
