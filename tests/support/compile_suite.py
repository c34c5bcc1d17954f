"""torch.compile, export and opcheck on the operations and modules; one suite for every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import fusedmlp
import fusedmlp.ops
from fusedmlp import _ops, saving
from fusedmlp.activations import resolve_activation

from .autograd_suite import leaves_of, requiring
from .compare import relative_error
from .fault_suite import SMALL, activation_of
from .operations import OPERATIONS, WAYS, Tensors

ops = pytest.mark.parametrize("op", list(OPERATIONS))
NAMESPACE = _ops.add_op_namespace_prefix("")
TOKENS = (7, 8, 64, 65, 1000, 1, 2, 0, 1000)

MODULES: dict[str, Callable[[], nn.Module]] = {
    "FusedLinearReLU": lambda: fusedmlp.FusedLinearReLU(96, 96),
    "FusedLinearAct": lambda: fusedmlp.FusedLinearAct(96, 96, activation="silu"),
    "FusedMLP": lambda: fusedmlp.FusedMLP(96, 160),
    "FusedReLUMLP": lambda: fusedmlp.FusedReLUMLP((96, 130, 96)),
    "FusedGLUMLP": lambda: fusedmlp.FusedGLUMLP(96, 160, bias=True),
    "FusedGeGLUMLP": lambda: fusedmlp.FusedGeGLUMLP(96, 160, keep_activation=True),
    "FusedSwiGLUMLP": lambda: fusedmlp.FusedSwiGLUMLP(96, 160, recompute=True),
}


class Block(nn.Module):
    """A pre-norm transformer block whose MLP is ours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(96), nn.LayerNorm(96)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.mlp = fusedmlp.FusedGeGLUMLP(96, 160)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def functional(op: str, **options: Any) -> Callable[[Tensors], Tensor]:
    def function(t: Tensors) -> Tensor:
        return OPERATIONS[op].fused(t, activation_of(op), **options)

    return function


def assert_same(op: str, compiled: Callable, plain: Callable, leaves: Tensors, tolerance: float = 1e-5) -> None:
    """Output and all gradients of a compiled call against the uncompiled one."""
    first, second = requiring(leaves), requiring(leaves)
    y, wanted = compiled(first), plain(second)
    assert y.shape == wanted.shape and y.dtype == wanted.dtype
    gy = torch.randn_like(wanted)
    y.backward(gy)
    wanted.backward(gy)
    assert relative_error(y, wanted) < tolerance
    for name, leaf in first.items():
        assert relative_error(leaf.grad, second[name].grad) < tolerance, name


class Recorder(TorchDispatchMode):
    """Remembers the arguments of every call of an operator of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith(NAMESPACE):
            self.calls.setdefault(name, []).append(args)
        return func(*args, **(kwargs or {}))


def registered() -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}


def recorded_calls(device: torch.device) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments for every operator: what training steps hand over; with biases whatever is kept, and without."""
    with Recorder() as recorder:
        for op in OPERATIONS:
            for bias in (True, False):
                leaves = requiring(leaves_of(op, torch.float32, device, rows=5))
                names = [n.removesuffix("_weight") for n in leaves if n.endswith("_weight")]
                weights = [leaves[f"{n}_weight"] for n in names]
                biases = [leaves[f"{n}_bias"] if bias else None for n in names]
                act = resolve_activation(activation_of(op))
                for options in OPERATIONS[op].savings if bias else [{}]:
                    y = fusedmlp.ops.call(
                        op, leaves["x"], weights, biases, act, saving.level(**{"recompute": False} | options)
                    )
                    y.backward(torch.randn_like(y))
    return recorder.calls


def detached(value: Any, grad: bool) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(grad)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return [detached(v, grad) for v in value]
    return value


class CompileSuite:
    backend = "aot_eager"
    token_counts: tuple[int, ...] = TOKENS
    more_token_counts: tuple[int, ...] = (3, 33, 129, 500)

    @pytest.fixture(autouse=True)
    def _fresh_dynamo(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("op, options", list(WAYS.values()), ids=list(WAYS))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_operations_in_one_graph(self, device, op, options, dtype):
        plain = functional(op, **options)
        compiled = torch.compile(plain, fullgraph=True, backend=self.backend)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        assert_same(op, compiled, plain, leaves_of(op, dtype, device), tolerance)

    @pytest.mark.parametrize("name", list(MODULES))
    def test_modules_in_one_graph(self, device, name):
        module = MODULES[name]().to(device)
        compiled = torch.compile(module, fullgraph=True, backend=self.backend)
        self.check_module(module, compiled, torch.randn(3, 11, 96, device=device))

    def test_transformer_blocks_in_one_graph(self, device):
        model = nn.Sequential(*[Block() for _ in range(4)]).to(device)
        compiled = torch.compile(model, fullgraph=True, backend=self.backend)
        self.check_module(model, compiled, torch.randn(2, 9, 96, device=device))

    def check_module(self, module: nn.Module, compiled: Callable, x: Tensor) -> None:
        gradients = []
        for call in (compiled, module):
            module.zero_grad()
            mine = x.clone().requires_grad_()
            y = call(mine)
            y.pow(2).sum().backward()
            gradients.append([y.detach(), mine.grad, *[p.grad.clone() for p in module.parameters()]])
        for ours, wanted in zip(*gradients, strict=True):
            assert relative_error(ours, wanted) < 1e-4

    @ops
    @pytest.mark.parametrize("dynamic, graphs", [(True, 3), (None, 4)])
    def test_token_counts(self, device, op, dynamic, graphs):
        """One dynamic graph beside those for 0 and 1 rows (and, undeclared, the first size), no other."""
        counter = CompileCounterWithBackend(self.backend)
        plain = functional(op)
        compiled = torch.compile(plain, fullgraph=True, backend=counter, dynamic=dynamic)
        parameters = leaves_of(op, torch.float32, device)
        for rows in self.token_counts:
            parameters["x"] = torch.randn(rows, SMALL[op][0], device=device)
            assert_same(op, compiled, plain, parameters)
        assert counter.frame_count <= graphs
        compiled_so_far = counter.frame_count
        for rows in self.more_token_counts:
            parameters["x"] = torch.randn(rows, SMALL[op][0], device=device)
            compiled(parameters)
        assert counter.frame_count <= compiled_so_far + 1, "a new token count compiled again"

    @ops
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
    def test_inference(self, device, op, mode):
        leaves, plain = leaves_of(op, torch.float32, device), functional(op)
        compiled = torch.compile(plain, fullgraph=True, backend=self.backend)
        with mode():
            assert relative_error(compiled(leaves), plain(leaves)) < 1e-5

    @ops
    def test_autocast(self, device, op):
        leaves, plain = leaves_of(op, torch.float32, device), functional(op)

        def step(t):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                return plain(t)

        assert_same(op, torch.compile(step, fullgraph=True, backend=self.backend), step, leaves, 2e-2)

    @ops
    def test_frozen_parameters(self, device, op):
        leaves = leaves_of(op, torch.float32, device)
        leaves["x"].requires_grad_()
        compiled = torch.compile(functional(op), fullgraph=True, backend=self.backend)
        gy = torch.randn(len(leaves["x"]), SMALL[op][-1], device=device)
        (dx,) = torch.autograd.grad(compiled(leaves), leaves["x"], gy)
        (wanted,) = torch.autograd.grad(functional(op)(leaves), leaves["x"], gy)
        assert relative_error(dx, wanted) < 1e-5

    def test_export(self, device):
        """torch.export with a free token count; the exported program computes what the module does."""
        module = fusedmlp.FusedGeGLUMLP(96, 160).to(device).eval()
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        with torch.no_grad():
            program = torch.export.export(
                module, (torch.randn(8, 96, device=device),), dynamic_shapes=({0: tokens},), strict=False
            )
            x = torch.randn(77, 96, device=device)
            assert relative_error(program.module()(x), module(x)) < 1e-5

    def test_bad_input_is_refused_while_tracing(self, device):
        compiled = torch.compile(functional("mlp"), backend=self.backend)
        leaves = leaves_of("mlp", torch.float32, device)
        leaves["x"] = torch.randn(4, 95, device=device)
        with pytest.raises(Exception, match="95"):
            compiled(leaves)

    def test_opcheck_of_every_operator(self, device):
        """Every operator of the namespace has recorded calls, and each call passes opcheck."""
        calls = recorded_calls(device)
        assert registered() == set(calls), "operators without a sample call, or calls of unregistered ones"
        assert len(calls) >= 2 * len(OPERATIONS)
        for name, arguments in calls.items():
            operator = getattr(_ops.ops, name.removeprefix(NAMESPACE)).default
            differentiable = not name.endswith("_backward")
            for args in arguments:
                for grad in (False, True) if differentiable else (False,):
                    torch.library.opcheck(operator, tuple(detached(a, grad) for a in args))
