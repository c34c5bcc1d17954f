"""Builds one layer from a safetensors file, reading just the tensors of that layer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
Shapes = dict[str, tuple[int, ...]]

# The names that safetensors gives to the dtypes that the layers compute in.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STACK_KEY = re.compile(r"(\d+)\.(weight|bias)")


def build_from_file(
    path: str | os.PathLike[str],
    prefix: str,
    linears: Sequence[str] | None,
    make: Callable[[Shapes], M],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> M:
    """The layer whose tensors are ``<prefix>.<linear>.weight`` and, if present, ``<prefix>.<linear>.bias``.

    Args:
        path: a safetensors file.
        prefix: what stands before the names, with or without the last dot; "" for none.
        linears: the Linears' names; ``("",)`` for a layer that owns its weight; None for a stack named 0,
            2, 4, ...
        make: makes the layer on the meta device from the shapes, by name without the prefix.
        device: where to put the tensors; the default device where None.
        dtype: to convert to; the file's own where None.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: tensors are missing, surplus or misshapen under the prefix; the message lists all of
            them.
        ValueError: the tensors are no floating point weights, or differ in dtype and ``dtype`` is None.
    """
    from safetensors import safe_open  # imported late: the layers work without a file

    if not os.path.isfile(path):
        raise FileNotFoundError(f"no safetensors file at {os.fspath(path)!r}")
    stem = prefix if not prefix or prefix.endswith(".") else prefix + "."
    target = torch.get_default_device() if device is None else torch.device(device)
    where = f"under the prefix {stem!r} of {os.fspath(path)!r}"
    source = "cpu" if target.type == "meta" else str(target)
    with safe_open(os.fspath(path), framework="pt", device=source) as file:
        keys = [k.removeprefix(stem) for k in file.keys() if k.startswith(stem)]
        _check_names(keys, linears, where)
        slices = {key: file.get_slice(stem + key) for key in keys}
        shapes: Shapes = {key: tuple(s.get_shape()) for key, s in slices.items()}
        _check_dims(shapes, where)
        made = make(shapes)
        _check_shapes(shapes, made, where)
        final = _dtype(slices, dtype, where)
        if target.type == "meta":
            return made.to(final)
        tensors: dict[str, Tensor] = {key: file.get_tensor(stem + key).to(final) for key in keys}
    made.load_state_dict(tensors, strict=True, assign=True)
    return made


def _check_names(keys: Sequence[str], linears: Sequence[str] | None, where: str) -> None:
    names = _stack_names(keys) if linears is None else linears
    weights = [f"{n}.weight" if n else "weight" for n in names]
    biases = [f"{n}.bias" if n else "bias" for n in names]
    missing = [k for k in weights if k not in keys]
    surplus = sorted(set(keys) - set(weights) - set(biases))
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if surplus:
        problems.append(f"surplus: {', '.join(surplus)}")
    if problems:
        allowed = f"needed: {', '.join(weights)}; may be there: {', '.join(biases)}"
        raise RuntimeError(f"tensors {where} do not fit the layer: {'; '.join(problems)} ({allowed})")


def _stack_names(keys: Sequence[str]) -> list[str]:
    """0, 2, 4, ..., as many as the file has numbers; a gap then shows up as one missing and one surplus."""
    numbers = {m.group(1) for k in keys if (m := _STACK_KEY.fullmatch(k))}
    return [str(2 * i) for i in range(max(len(numbers), 1))]


def _check_dims(shapes: Shapes, where: str) -> None:
    wrong = [
        f"{key} {list(shape)} ({want} dimensions needed)"
        for key, shape in shapes.items()
        if len(shape) != (want := 2 if key.endswith("weight") else 1) or 0 in shape
    ]
    if wrong:
        raise RuntimeError(f"tensors {where} are misshapen: {', '.join(wrong)}")


def _check_shapes(shapes: Shapes, made: nn.Module, where: str) -> None:
    own = {key: tuple(value.shape) for key, value in made.state_dict().items()}
    wrong = [f"{k}: got {list(shapes[k])}, {list(own[k])} needed" for k in shapes if shapes[k] != own[k]]
    if wrong:
        raise RuntimeError(f"tensors {where} are misshapen: {'; '.join(wrong)}")


def _dtype(slices: dict[str, Any], wanted: torch.dtype | None, where: str) -> torch.dtype:
    found = {key: str(s.get_dtype()) for key, s in slices.items()}
    listed = ", ".join(f"{key} {name}" for key, name in found.items())
    if not set(found.values()) <= set(_DTYPES):
        raise ValueError(f"tensors {where} must be one of {', '.join(_DTYPES)}; got {listed}")
    if wanted is not None:
        return wanted
    if len(set(found.values())) > 1:
        raise ValueError(f"tensors {where} differ in dtype ({listed}); say which with dtype=")
    return _DTYPES[next(iter(found.values()))]
