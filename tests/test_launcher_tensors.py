"""Tables of the compiled launcher over PyTorch's own tensors, on the CPU: what is taken for what, what is refused."""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.launcher_process import built
from support.native import CAN_COMPILE, CAN_EXCHANGE, NEEDS_COMPILER, NEEDS_EXCHANGE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmlp import _children, checks
from fusedmlp import plan as plans

pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER),
    pytest.mark.skipif(not CAN_EXCHANGE, reason=NEEDS_EXCHANGE),
]


@pytest.fixture(scope="module")
def launcher() -> Any:
    """A build of its own, connected as steady.py does; it stays apart from the one that the package has."""
    spec = importlib.util.spec_from_file_location("fusedmlp._launcher", built("plain")[0])
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.connect(
        tensor_type=Tensor,
        parameter_type=torch.nn.Parameter,
        linear_type=torch.nn.Linear,
        global_hooks=_children.GLOBAL_HOOKS,
        exchange=Tensor.__dlpack_c_exchange_api__,  # type: ignore[attr-defined]
        grad_enabled=torch.is_grad_enabled,
        dispatch_modes=checks._dispatch_modes,
        tracing_state=checks._tracing_state,
        transforms_active=checks._transforms_active,
        forward_ad=checks._forward_ad,
        hooks=types.SimpleNamespace(launch_enter_hook=None),
        busy=([],),
        precision=plans.fp32_precision,
        allocate=None,
        release=None,
    )
    return made


@pytest.fixture
def table(launcher: Any) -> Any:
    return launcher.Table(-1)


def matrix() -> Tensor:
    return torch.zeros(6, 32)


class Subclass(Tensor):
    pass


def hit(*operands: Any) -> str:
    return "hit"


SAME: dict[str, Callable[[], Tensor]] = {
    "other memory": matrix,
    "a parameter": lambda: torch.nn.Parameter(matrix(), requires_grad=False),
    "rows of a larger one": lambda: torch.zeros(9, 32)[2:8],
    "a view": lambda: torch.zeros(192).view(6, 32),
    "swapped data": lambda: _with_data(torch.nn.Parameter(torch.zeros(1), requires_grad=False), matrix()),
    "an inference tensor": lambda: _in_inference(matrix),
    "detached": lambda: torch.nn.Parameter(matrix()).detach(),
    "negated twice": lambda: torch._neg_view(torch._neg_view(matrix())),
}
OTHER: dict[str, Callable[[], Tensor]] = {
    "another shape": lambda: torch.zeros(7, 32),
    "another rank": lambda: torch.zeros(1, 6, 32),
    "transposed": lambda: torch.zeros(32, 6).t(),
    "columns of a wider one": lambda: torch.zeros(6, 64)[:, :32],
    "every other column": lambda: torch.zeros(6, 64)[:, ::2],
    "expanded": lambda: torch.zeros(1, 32).expand(6, 32),
    "one number": lambda: torch.zeros(()).expand(6, 32),
    "unaligned": lambda: torch.zeros(193)[1:].view(6, 32),
    "of 16 bits": lambda: matrix().to(torch.bfloat16),
    "of the other 16 bits": lambda: matrix().half(),
    "of 64 bits": lambda: matrix().double(),
    "integers": lambda: matrix().int(),
    "with a gradient": lambda: torch.nn.Parameter(matrix()),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: matrix().as_subclass(Subclass),
    "a parameter of a subclass": lambda: torch.nn.Parameter(matrix().as_subclass(Subclass)),
    "negated": lambda: torch._neg_view(matrix()),
    "an imaginary part": lambda: torch.zeros(6, 32, dtype=torch.complex64).conj().imag,
    "sparse": lambda: matrix().to_sparse(),
    "sparse rows": lambda: _quietly(lambda: matrix().to_sparse_csr()),
    "nested": lambda: _quietly(lambda: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])),
    "without memory": lambda: torch.zeros(6, 32, device="meta"),
    "zeros without memory": lambda: torch._efficientzerotensor((6, 32)),
    "a fake tensor": lambda: _fake(),
    "empty": lambda: torch.zeros(0, 32),
    "of nine dimensions": lambda: matrix().view(1, 1, 1, 1, 1, 1, 1, 6, 32),
    "freed": lambda: _freed(matrix()),
    "no tensor": lambda: 5,
    "an array": lambda: matrix().numpy(),
}


def _with_data(parameter: Tensor, data: Tensor) -> Tensor:
    parameter.data = data
    return parameter


def _in_inference(make: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return make()


def _quietly(make: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these layouts are a beta or a prototype
        return make()


def _fake() -> Tensor:
    with FakeTensorMode():
        return matrix()


def _freed(t: Tensor) -> Tensor:
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("name", SAME)
def test_the_same_layout(table, name):
    assert table.add(hit, False, matrix())
    assert table.call(SAME[name]()) == "hit"


@pytest.mark.parametrize("name", OTHER)
def test_another_layout(table, name):
    assert table.add(hit, False, matrix())
    other = OTHER[name]()
    assert table.call(other) is None
    assert table.add(lambda t: name, False, other)
    assert table.call(other) == name and table.call(matrix()) == "hit"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(table, name):
    plain = matrix()
    assert table.add(hit, False, plain) and table.add(hit, False, plain, plain)
    t = REFUSED[name]()
    assert table.call(t) is None and table.add(hit, False, t) is False
    assert table.call(plain, t) is None and table.add(hit, False, plain, t) is False
    assert table.call(plain) == "hit"


def test_gradients_count_while_they_are_recorded(table):
    t, plain = torch.nn.Parameter(matrix()), matrix()
    table.add(hit, False, plain, plain)
    assert table.call(t, plain) is None and table.call(plain, t) is None
    with torch.no_grad():
        assert table.call(t, plain) == "hit"
    with torch.inference_mode():
        assert table.call(t, t) == "hit"
    t.requires_grad_(False)
    assert table.call(t, plain) == "hit"
    plain.requires_grad_()
    assert table.call(t, plain) is None
    assert table.call(matrix() + plain, matrix()) is None  # no leaf


def test_precision_counts(table):
    torch.set_float32_matmul_precision("highest")
    table.add(hit, False, matrix())
    half = matrix().half()
    table.add(hit, False, half)
    torch.set_float32_matmul_precision("high")
    assert table.call(matrix()) is None and table.call(half) == "hit"


def test_tensors_in_place_changed_layouts(table):
    t = matrix()
    table.add(hit, False, t)
    t.t_()
    assert table.call(t) is None
    t.t_()
    assert table.call(t) == "hit"
    t.resize_(5, 32)
    assert table.call(t) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
def test_what_stands_for_more_than_its_numbers(table):
    t = matrix()
    table.add(hit, False, t)
    seen = []

    def look(*tensors: Tensor) -> Tensor:
        seen.append((table.call(t), table.call(tensors[0])))
        return tensors[0] * 1.0

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        look(t)
    torch.func.vmap(look)(torch.zeros(2, 6, 32))
    torch.func.grad(lambda x: look(x).sum())(t)
    torch.func.functionalize(look)(t)
    torch.jit.trace(look, (t,), check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        look(torch.autograd.forward_ad.make_dual(t, t))
    assert seen == [(None, None)] * len(seen) and len(seen) >= 6
    assert table.call(t) == "hit"


def test_batched_gradients_are_refused(table):
    seen: list[Any] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gy: Tensor) -> Tensor:  # type: ignore[override]
            seen.append((table.call(gy), table.add(hit, False, gy)))
            return gy * 2

    x = matrix().requires_grad_()
    y = Double.apply(x)
    gy = torch.ones(6, 32)
    table.add(hit, False, gy)
    torch.autograd.grad(y, x, gy, retain_graph=True)
    assert seen == [("hit", True)]
    torch.autograd.grad(y, x, torch.ones(3, 6, 32), is_grads_batched=True)
    assert seen[1:] == [(None, False)]


def test_operands_are_let_go(table):
    tensors = [matrix(), torch.nn.Parameter(matrix()), matrix().to_sparse(), torch._neg_view(matrix())]
    gc.collect()
    before = [sys.getrefcount(t) for t in tensors]
    for _ in range(50):
        for t in tensors:
            table.add(hit, False, t)
            table.call(t)
            table.call(t, tensors[0])
    del t
    assert [sys.getrefcount(t) for t in tensors] == before
