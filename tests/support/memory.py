"""Memory that shows faults: NaN around inputs and in fresh outputs, proof that nothing was written over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "poisoned", "chunk", "chunk_tail", "transpose", "step", "offset", "expand")
GRADIENT_LAYOUTS = (
    "contiguous",
    "poisoned",
    "transpose",
    "step",
    "offset",
    "scalar",
    "per_row",
    "per_column",
)
WEIGHT_LAYOUTS = ("contiguous", "poisoned", "transpose", "step", "offset")
View = Callable[[Tensor], Tensor]


def _surrounded(values: Tensor) -> Tensor:
    """A view with the given values in the middle of a NaN-filled buffer, NaN between rows as well."""
    shape = [size + 6 for size in values.shape]
    buffer = torch.full(shape, float("nan"), dtype=values.dtype, device=values.device)
    middle = buffer[tuple(slice(3, 3 + size) for size in values.shape)]
    middle.copy_(values)
    return middle


def _in_buffer(values: Tensor, shape: tuple[int, ...], view: View) -> tuple[Tensor, View]:
    buffer = torch.full(shape, float("nan"), dtype=values.dtype, device=values.device)
    view(buffer).copy_(values)
    return buffer, view


def place(values: Tensor, layout: str) -> tuple[Tensor, View]:
    """Put values into memory: (leaf, view), view(leaf) has their shape and the wanted strides.

    "expand", "scalar", "per_row" and "per_column" repeat a part of the values with stride 0. A layout that
    the rank does not allow (a transposed vector) is laid out contiguously.
    """
    shape = tuple(values.shape)
    if layout == "poisoned":
        return _surrounded(values), lambda t: t
    if layout == "chunk":
        return _in_buffer(values, (*shape[:-1], 2 * shape[-1]), lambda t: t[..., : shape[-1]])
    if layout == "chunk_tail":
        return _in_buffer(values, (*shape[:-1], 2 * shape[-1]), lambda t: t[..., shape[-1] :])
    if layout == "step":
        return _in_buffer(values, (*shape[:-1], 2 * shape[-1]), lambda t: t[..., ::2])
    if layout == "offset":
        return _in_buffer(values, (values.numel() + 1,), lambda t: t[1:].view(shape))
    if layout == "transpose" and len(shape) >= 2:
        return values.transpose(0, 1).contiguous(), lambda t: t.transpose(0, 1)
    if layout in ("expand", "per_column") and len(shape) >= 2:
        return values[:1].contiguous(), lambda t: t.expand(shape)
    if layout == "per_row":
        return values[..., :1].contiguous(), lambda t: t.expand(shape)
    if layout == "scalar" and values.numel():
        return values.flatten()[:1].clone(), lambda t: t.expand(shape)
    return values.contiguous(), lambda t: t


def stored_bytes(tensor: Tensor) -> Tensor:
    """A copy of every byte of the storage behind a tensor, its surroundings included."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone()


@contextmanager
def unchanged(tensors: dict[str, Tensor]) -> Iterator[Callable[[str], None]]:
    """Yields check(when), which raises when a byte of any storage has changed; checks at the end too."""
    before = {name: stored_bytes(tensor) for name, tensor in tensors.items()}

    def check(when: str) -> None:
        for name, tensor in tensors.items():
            changed = int((stored_bytes(tensor) != before[name]).sum())
            if changed:
                raise AssertionError(f"{name}: {changed} bytes of its storage were written over {when}")

    yield check
    check("by the end")


def _poison(tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
        with torch.no_grad():
            tensor.fill_(float("nan"))
    return tensor


@contextmanager
def poisoned_memory() -> Iterator[list[int]]:
    """Fresh memory from torch.empty and its kin holds NaN; yields a list that grows by one per allocation."""
    seen: list[int] = []

    def wrap(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def poisoned(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return _poison(allocate(*args, **kwargs))

        return poisoned

    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    places += [(Tensor, "new_empty"), (Tensor, "new_empty_strided")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    inherited = {(owner, name) for owner, name in places if name not in vars(owner)}
    for owner, name, allocate in originals:
        setattr(owner, name, wrap(allocate))
    try:
        yield seen
    finally:
        for owner, name, allocate in originals:
            if (owner, name) in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, allocate)
