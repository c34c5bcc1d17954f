"""How each kernel is launched for a shape: :func:`calculate_settings`. Never by benchmarking at run time.

A measured table for the GPU model, the user's own before the shipped one, wins where it has the shape; else the
heuristic decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from . import device, heuristic, tables
from .types import FAMILIES, GLUON_ONLY_OPS, GLUON_OPS, OPS, PRODUCTS, SMALL_TOKENS, Settings

__all__ = ["FAMILIES", "OPS", "Settings", "calculate_settings", "measured_row", "override", "overridden"]

_override: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("fusedmlp_settings_override", default=())
active: list[None] = []  # one for each override that some thread is inside of


@contextmanager
def override(op: str | None = None, **fields: Any) -> Iterator[None]:
    """Force fields of every :class:`Settings` calculated inside, e.g. ``override(family="pointer", stages=2)``; of one
    ``op`` alone (of :data:`OPS`) where it is named, e.g. ``override("dual_dgrad", family="pair")``.

    A forced ``family`` that the shape cannot take (TMA needs 16-byte strides, "small" few tokens), or of which
    an operation has no kernel, is not forced there.

    Raises:
        TypeError: a name is not a field of :class:`Settings`; the message lists them.
        ValueError: an unknown op.
    """
    unknown = set(fields) - set(Settings.__dataclass_fields__)
    if unknown:
        raise TypeError(f"no such settings: {sorted(unknown)}; there are {sorted(Settings.__dataclass_fields__)}")
    if op is not None:
        _check_op(op)
    prefix = "" if op is None else f"{op}."
    token = _override.set((*_override.get(), *[(prefix + name, value) for name, value in sorted(fields.items())]))
    active.append(None)
    try:
        yield
    finally:
        active.pop()
        _override.reset(token)


def overridden() -> tuple[tuple[str, Any], ...]:
    """The forced fields, a part of every plan's key; those of one op as ``"op.field"``."""
    return _override.get()


def forced(op: str) -> dict[str, Any]:
    """The forced fields of an op, the latest of each; what is forced of linear_act is so of linear_relu."""
    of = (f"{op}.", "linear_act.") if op == "linear_relu" else f"{op}."
    return {name.rpartition(".")[2]: value for name, value in overridden() if "." not in name or name.startswith(of)}


def _check_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; the known ones are: {', '.join(OPS)}")


def _possible(op: str, dtype: torch.dtype, info: device.DeviceInfo, tma: bool) -> tuple[bool, bool]:
    """Whether the TMA and the Gluon kernels can serve; tma: whether the operands allow it."""
    tma = tma and info.has_tma and heuristic.tma_dtype(dtype)
    return tma, tma and info.has_wgmma and op in GLUON_OPS


def calculate_settings(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device_: torch.device | str,
    *,
    precision: str = "ieee",
    tma: bool = True,
) -> Settings:
    """Settings for one kernel at one shape.

    Args:
        op: one of :data:`OPS`.
        M: tokens. N: columns of the output (for the gated kernels, of gate alone). K: the summed dimension.
        dtype: of the operands: float32, bfloat16 or float16.
        device_: where it runs; a CPU means Triton's interpreter.
        precision: of an fp32 product: ``"ieee"`` or ``"tf32"``; ignored for the 16-bit dtypes.
        tma: False where a pointer or stride is no multiple of 16 bytes, which TMA descriptors need.

    Raises:
        ValueError: an unknown op.
    """
    _check_op(op)
    info = device.info(torch.device(device_))
    aligned = tma
    tma, gluon = _possible(op, dtype, info, tma)
    fields = forced(op)
    family = fields.pop("family", None)
    if (family == "gluon" and not gluon) or (family == "small" and M > SMALL_TOKENS.get(op, 0)):
        family = "tma"
    if family == "tma" and not tma:
        family = "pointer"
    if (op in GLUON_ONLY_OPS and family in ("tma", "pointer")) or (op in PRODUCTS and family not in (None, "small")):
        family = "pair"
    found = tables.lookup(info.slug, op, M, N, K, dtype, precision, tma, gluon, aligned) if family is None else None
    if found is None:
        family = family or heuristic.family(op, M, N, K, dtype, tma, gluon, info)
        found = heuristic.settings(op, M, N, K, dtype, family, info, aligned)
    return replace(found, **fields) if fields else found


def measured_row(
    chosen: Settings,
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device_: torch.device | str,
    *,
    precision: str = "ieee",
    tma: bool = True,
) -> tables.Row | None:
    """The row of a table that ``chosen`` comes from, with what was measured; None where the heuristic or
    :func:`override` decided. The other arguments are those that :func:`calculate_settings` had."""
    info = device.info(torch.device(device_))
    row = tables.find(info.slug, op, M, N, K, dtype, precision, *_possible(op, dtype, info, tma), aligned=tma)
    return row if row is not None and row.settings == chosen else None
