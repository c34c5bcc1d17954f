"""Repairs of Triton's interpreter (TRITON_INTERPRET=1), for tests only.

The interpreter keeps a bfloat16 value as the raw bits of a uint16 array, and several of its operations work
on those bits as if they were numbers. `repair()` makes it compute what a GPU computes:

* `tl.dot`, arithmetic, comparisons, unary operations and `fma` on bfloat16 go through float32 and are rounded
  once;
* every conversion to bfloat16 rounds to nearest, ties to even (the interpreter drops the low bits);
* bfloat16 to float16, float64 or an integer converts the value, not the bits;
* a row of a TMA descriptor is a multiple of 16 bytes long (3.5 asks for 16 elements, of whatever size);
* a spin loop, which never ends where programs run one after another, is an error instead of a hang;
* a one-element tensor is an index under NumPy 2.4 and newer, where `int(array of shape (1,))` raises.

It works on Triton 3.5 and newer; a release in which a needed hook has gone is refused by name.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

_HOOKS = ("create_dot", "cast_impl", "binary_op", "unary_op", "create_fma", "create_fp_to_fp")
_SPIN_HOOKS = ("create_atomic_rmw", "set_grid_idx")
SPIN_LIMIT = 10_000
_QUIET_NAN = np.uint16(0x7FC0)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 values -> the same values in float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 values -> uint16 bits of the nearest bfloat16, ties to even, NaN kept."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    with np.errstate(over="ignore"):  # NaN payloads wrap around; they are replaced below
        rounded = ((bits + to_even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    """The handle itself, or its float32 twin when it holds bfloat16 bits."""
    if not _is_bf16(handle):
        return handle
    return interpreter.TensorHandle(bf16_to_f32(handle.data), tl.float32)


def _narrow(handle: Any) -> Any:
    """A float32 result back to bfloat16 bits; comparison results (booleans) stay as they are."""
    if handle.data.dtype == np.bool_:
        return handle
    return interpreter.TensorHandle(f32_to_bf16(handle.data).reshape(handle.data.shape), tl.bfloat16)


def _through_float32(original: Any, operands: int) -> Any:
    """Wrap a builder method whose first `operands` arguments are values."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        values, rest = args[:operands], args[operands:]
        if not any(_is_bf16(value) for value in values):
            return original(self, *args, **kwargs)
        return _narrow(original(self, *map(_widen, values), *rest, **kwargs))

    return wrapped


def _repair_conversions(builder: Any) -> None:
    cast, fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _is_bf16(source) == (target.scalar == tl.bfloat16):
            return cast(self, source, target)
        if _is_bf16(source):
            wide = _widen(source)
            return wide if target.scalar == tl.float32 else cast(self, wide, target)
        return _narrow(source if source.dtype.scalar == tl.float32 else cast(self, source, tl.float32))

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        toward_zero = rounding is not None and "RTZ" in str(rounding).upper()
        if tl.bfloat16 in (source.dtype.scalar, target.scalar) and not toward_zero:
            return cast_impl(self, source, target)
        return fp_to_fp(self, source, target, rounding)

    builder.cast_impl = cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp


def _refuse_spinning(builder: Any) -> None:
    atomic, set_index = builder.create_atomic_rmw, builder.set_grid_idx

    def set_grid_idx(self: Any, *index: Any) -> Any:
        self.atomics_of_this_program = 0
        return set_index(self, *index)

    def create_atomic_rmw(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.atomics_of_this_program = getattr(self, "atomics_of_this_program", 0) + 1
        if self.atomics_of_this_program > SPIN_LIMIT:
            raise RuntimeError(
                f"one program made {SPIN_LIMIT} atomic operations: it waits for programs that the "
                f"interpreter starts after it. Launch kernels with a grid barrier as one program here; "
                f"this grid is {self.grid_dim}"
            )
        return atomic(self, *args, **kwargs)

    builder.set_grid_idx, builder.create_atomic_rmw = set_grid_idx, create_atomic_rmw


def _repair_strides() -> None:
    validate = interpreter.TensorDescHandle.validate

    def validate_bytes(self: Any) -> None:
        size, elements = self.base.dtype.element_ty.primitive_bitwidth // 8, self.strides
        self.strides = [*(interpreter.TensorHandle(s.data * size, s.dtype) for s in elements[:-1]), elements[-1]]
        try:
            validate(self)
        finally:
            self.strides = elements

    interpreter.TensorDescHandle.validate = validate_bytes


def _repair_index() -> None:
    original = interpreter._patch_lang_tensor

    def as_index(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", as_index)
        else:
            tensor.__index__ = as_index

    interpreter._patch_lang_tensor = patch_lang_tensor


def _remember_builtins() -> None:
    """Each call of a jitted function looks through all members of Triton's language for those to replace, which is a
    fifth of what these tests take. Which they are does not change."""
    names: dict[Any, list[str]] = {}

    def patch_builtin(pkg: Any, builder: Any, *scope: Any) -> None:
        if pkg not in names:  # before anything in it is replaced
            names[pkg] = [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
        for name in names[pkg]:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, *scope)

    interpreter._patch_builtin = patch_builtin


def repair() -> None:
    """Install the repairs, once. RuntimeError when this Triton lacks a needed hook."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired_for_tests", False):
        return
    missing = [name for name in (*_HOOKS, *_SPIN_HOOKS) if not hasattr(builder, name)]
    if missing or not hasattr(interpreter, "_patch_lang_tensor"):
        raise RuntimeError(
            f"Triton {triton.__version__}: the interpreter has no {missing or '_patch_lang_tensor'}; "
            "tests/support/interpreter.py supports 3.5 and newer and must be adapted to this release"
        )
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any, **kwargs: Any) -> Any:
        return dot(self, _widen(a), _widen(b), acc, *rest, **kwargs)

    builder.create_dot = create_dot
    builder.binary_op = _through_float32(builder.binary_op, 2)
    builder.unary_op = _through_float32(builder.unary_op, 1)
    builder.create_fma = _through_float32(builder.create_fma, 3)
    _repair_conversions(builder)
    _refuse_spinning(builder)
    _repair_index()
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        _remember_builtins()
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        _repair_strides()
    builder.repaired_for_tests = True
