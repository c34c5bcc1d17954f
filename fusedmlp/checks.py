"""Checks of what users pass in: the exception that eager would raise, saying what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_T = TypeVar("_T")

# Looked up once: these are asked at every call.
_Parameter = torch.nn.Parameter
any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_transforms_active = torch._C._are_functorch_transforms_active
_forward_ad = torch.autograd.forward_ad

# One operand: its name as the user knows it, and the tensor.
Named = tuple[str, Tensor]


def autocasting(device_type: str) -> bool:
    """Whether autocast is on for a kind of device; some kinds (meta) do not know autocast."""
    if device_type not in ("cuda", "cpu") and not torch.amp.is_autocast_available(device_type):
        return False
    return torch.is_autocast_enabled(device_type)


def no_autocast(x: Tensor) -> bool:
    """Whether autocast is off wherever it could matter to x; False where that takes a closer look."""
    return not any_autocast() and (x.is_cuda or x.is_cpu)


def check_call(operation: Any, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Everything about the operands of an operation.

    Raises:
        TypeError, RuntimeError: as :func:`check_tensors` and the operation's own ``check``.
    """
    weight_names, bias_names = operation.names(len(weights))
    others = list(zip(weight_names, weights))
    others += [(n, b) for n, b in zip(bias_names, biases) if b is not None]
    check_tensors(x, others)
    operation.check(x, weights, biases)


def check_tensors(x: Tensor, others: Sequence[Named]) -> None:
    """Kinds, dtypes and devices.

    Raises:
        TypeError: something is no tensor.
        RuntimeError: an integer or complex tensor; dtypes or devices that differ.
    """
    for name, t in [("x", x), *others]:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if not t.is_floating_point():
            raise RuntimeError(
                f"{name} has dtype {t.dtype}; only real floating-point tensors are allowed. Convert it with .float()"
            )
    for name, t in others:
        if t.device != x.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but x is on {x.device} and {name} is on {t.device}. "
                f"Move one of them with .to(device)"
            )
        if t.dtype != x.dtype:
            raise RuntimeError(
                f"expected x and {name} to have the same dtype, but got {x.dtype} and {t.dtype}. "
                f"Convert one of them, or use torch.autocast"
            )


def check_input(x: Tensor, width: int, weight_name: str, weight: Tensor) -> None:
    """The last dimension of x against a weight.

    Raises:
        RuntimeError: x is a scalar, or its last dimension is not ``width``.
    """
    if x.dim() == 0:
        raise RuntimeError(f"x is a scalar; allowed: [..., {width}] with at least one dimension")
    if x.shape[-1] != width:
        raise RuntimeError(
            f"x has shape {list(x.shape)}, whose last dimension is {x.shape[-1]}, but {weight_name} of shape "
            f"{list(weight.shape)} takes {width}; allowed: [..., {width}]"
        )


def check_weight(name: str, weight: Tensor, rows: int | None = None, columns: int | None = None) -> None:
    """Rank and sizes of a weight [rows, columns]; None leaves a size open.

    Raises:
        RuntimeError: another rank or size.
    """
    expected = f"[{'N' if rows is None else rows}, {'K' if columns is None else columns}]"
    if weight.dim() != 2:
        raise RuntimeError(f"{name} has shape {list(weight.shape)}; allowed: a matrix {expected}")
    if (rows is not None and weight.shape[0] != rows) or (columns is not None and weight.shape[1] != columns):
        raise RuntimeError(f"{name} has shape {list(weight.shape)}, which does not fit; allowed: {expected}")


def check_bias(name: str, bias: Tensor | None, width: int) -> None:
    """Shape of a bias.

    Raises:
        RuntimeError: anything but [width].
    """
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != width):
        raise RuntimeError(f"{name} has shape {list(bias.shape)}; allowed: [{width}]")


def plain(tensors: Sequence[Tensor | None]) -> str | None:
    """Why raw-pointer kernels must not read these tensors, or None.

    A subclass (DTensor, quantised weights) may hold something else than its shape says; inside ``torch.func``
    transforms, forward-mode AD, tracers and dispatch modes a call stands for more than its numbers.
    """
    for t in tensors:
        if t is None:
            continue
        kind = type(t)
        if kind is not _Parameter and kind is not Tensor:
            return f"a {kind.__name__} is not a plain tensor"
        if t.is_neg():
            return "a tensor with its negative bit set (a view of a complex one) does not hold its own values"
    if _dispatch_modes() and not _only_watched():
        return "a TorchDispatchMode is active and sees PyTorch's operations only"
    if _tracing_state() is not None:
        return "inside torch.jit.trace"
    return _transformed()


def _only_watched() -> bool:
    """Whether every active mode says of itself that it changes nothing, as the launch counter does."""
    return all(getattr(mode, "only_watches", False) for mode in _get_current_dispatch_mode_stack())


def plain_while_compiling(tensors: Sequence[Tensor | None]) -> str | None:
    """The same while a compiler traces, whose own stand-ins count as plain."""
    for t in tensors:
        if t is not None and type(t) not in (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor):
            return f"a {type(t).__name__} is not a plain tensor"
    return _transformed_while_compiling()


def _transformed() -> str | None:
    if _transforms_active():
        return "inside a torch.func transform"
    if _forward_ad._current_level >= 0:
        return "inside forward-mode differentiation"
    return None


def constant_while_compiling(function: Callable[[], _T]) -> Callable[[], _T]:
    """``torch.compiler.assume_constant_result``, whose decorator alone would import all of Dynamo, and Triton with it,
    into every program."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_compiling
def _transformed_while_compiling() -> str | None:
    return _transformed()


def strange(tensors: Sequence[Tensor | None]) -> str | None:
    """Why these tensors have no strided memory to speak of (sparse, nested, mkldnn), or None."""
    for t in tensors:
        if isinstance(t, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t):
            return "a tensor that outlived its torch.func transform"
        if isinstance(t, Tensor) and (t.is_nested or t.layout is not torch.strided):
            return f"a {'nested' if t.is_nested else t.layout} tensor has no rows in memory"
    return None
