"""Measured settings of a GPU model: the table that is shipped beside this module, overlaid by the user's own.

Both are ``<slug>.json``: ``{"gpu": ..., "rows": [{"op", "dtype", "precision", "M", "N", "K", "settings": {...}}]}``. A
row stands for its N and K exactly and for the M above the row before it, up to its own, so that a new token count
needs no new row. Rows may say what was measured, in microseconds: ``us`` of the chosen, ``pair_us`` of cuBLAS and a
pointwise kernel, ``fused_us`` of the fastest fused kernel where the pair is the chosen.

The user's table (``python -m fusedmlp tune`` writes it) is ``$FUSEDMLP_SETTINGS``, a file or a folder with
``<slug>.json``; else ``<slug>.json`` in ``$XDG_CACHE_HOME/fusedmlp`` or ``~/.cache/fusedmlp``. Set empty, the variable
means none. It is read once, for the first plan on a device. One that cannot be used is a warning, never an error.
"""

from __future__ import annotations

import json
import os
import warnings
from bisect import bisect_left
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .device import INTERPRETER, slug_of
from .types import FAMILIES, OPS, SMALL_OPS, Settings

VARIABLE = "FUSEDMLP_SETTINGS"
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = {"float32": ("ieee", "tf32"), "bfloat16": ("",), "float16": ("",)}
# The user's last row holds for more tokens than its own from here on, where tiles keep every GPU busy. One of fewer
# tokens (of a run for decoding alone, or one that its budget stopped) says nothing of larger batches.
HOLDS_FROM = 2048
_POWERS = ("block_m", "block_n", "block_k", "parts", "warps")
_TIMES = ("us", "pair_us", "fused_us")

Key = tuple[str, str, str, int, int]  # op, dtype, precision, N, K


class Row(NamedTuple):
    """One measured choice.

    Attributes:
        M: tokens, the most that it stands for.
        settings: the chosen.
        us: time of the chosen, in microseconds. pair_us: of cuBLAS and a pointwise kernel. fused_us: of the fastest
            fused kernel, where the pair was chosen. None where not measured.
        own: whether it comes from the user's table.
    """

    M: int
    settings: Settings
    us: float | None = None
    pair_us: float | None = None
    fused_us: float | None = None
    own: bool = False

    @property
    def pair_ratio(self) -> float | None:
        """The pair's time over that of the fused kernel; None where one of the two was not measured."""
        fused = self.fused_us if self.settings.family == "pair" else self.us
        return self.pair_us / fused if self.pair_us and fused else None


Table = dict[Key, list[Row]]


def _refuse(why: str, row: Any) -> ValueError:
    return ValueError(f"settings table: {why} in row {row}")


def _settings_of(row: dict[str, Any]) -> Settings:
    try:
        found = Settings(**row["settings"])
    except TypeError as error:
        raise _refuse(str(error), row) from None
    if row["op"] not in OPS or found.family not in FAMILIES:
        raise _refuse("unknown op or family", row)
    for name, value in row["settings"].items():
        if name == "family":
            continue
        power = name in _POWERS and not (name == "parts" and found.family == "small")  # which splits K as it likes
        if type(value) is not int or value < 1 or (power and value & (value - 1)):
            kind = "a power of two" if power else "a whole number, 1 or more"
            raise _refuse(f"{name} must be {kind}, not {value!r}", row)
    if row["op"] == "relu_stack" and found.family != "pointer":
        raise _refuse("relu_stack has pointer kernels alone", row)
    if found.family == "small" and row["op"] not in SMALL_OPS:
        raise _refuse(f"{row['op']} has no kernel for small batches", row)
    if found.family == "gluon" and found.stages < 2:
        raise _refuse("a gluon kernel needs 2 stages or more", row)
    return found


def parse(text: str, own: bool = False) -> Table:
    """The rows of a table, by (op, dtype, precision, N, K), each list sorted by M.

    Raises:
        ValueError: no JSON, no rows, or a row with an unknown op, family or field, or a value that no kernel takes.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError('settings table: it must be an object with a list "rows"')
    table: dict[Key, dict[int, Row]] = {}
    for row in content["rows"]:
        wanted = ("op", "dtype", "precision", "M", "N", "K", "settings")
        if not isinstance(row, dict) or (missing := [name for name in wanted if name not in row]):
            raise _refuse(f"no {', '.join(missing)}" if isinstance(row, dict) else "no object", row)
        found = _settings_of(row)
        if row["dtype"] not in DTYPES or row["precision"] not in PRECISIONS[row["dtype"]]:
            raise _refuse("unknown dtype or precision", row)
        if any(type(row[name]) is not int or row[name] < 1 for name in "MNK"):
            raise _refuse("M, N and K must be whole numbers, 1 or more,", row)
        times = [row.get(name) for name in _TIMES]
        if any(time is not None and (type(time) not in (int, float) or not time > 0) for time in times):
            raise _refuse(f"{', '.join(_TIMES)} must be microseconds above 0", row)
        key = (row["op"], row["dtype"], row["precision"], row["N"], row["K"])
        table.setdefault(key, {})[row["M"]] = Row(row["M"], found, times[0], times[1], times[2], own)
    return {key: [rows[m] for m in sorted(rows)] for key, rows in table.items()}


def user_path(slug: str) -> Path | None:
    """Where the user's table of a GPU model is or would be; None where the variable turns it off."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        path = Path(named).expanduser()
        return (path / f"{slug}.json" if path.is_dir() else path) if named else None
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if Path(cache_home).is_absolute() else Path.home() / ".cache"
    return base / "fusedmlp" / f"{slug}.json"


def _read_user(slug: str) -> Table:
    """The user's table; empty, with a warning that names the file and the reason, where it cannot be used."""
    path: Path | str | None = os.environ.get(VARIABLE, "the user's cache folder")
    try:
        path = user_path(slug)
        if path is None or slug == INTERPRETER.slug:
            return {}
        if not path.exists():
            named = os.environ.get(VARIABLE)
            if named and path == Path(named).expanduser():
                raise FileNotFoundError(f"there is no such file or folder, and {VARIABLE} names it")
            return {}
        text = path.read_text(encoding="utf-8")
        table = parse(text, own=True)
        gpu = json.loads(text).get("gpu")
        if gpu is not None and slug_of(str(gpu)) != slug:
            raise ValueError(f"it was measured on {gpu}, and this GPU is {slug}")
        return table
    except Exception as error:  # whatever a file can hold: it must not end a user's step
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"fusedmlp ignores the settings table {path}: {reason[:400]}", UserWarning, stacklevel=2)
        return {}


def _shipped(slug: str) -> Table:
    path = files(__package__) / f"{slug}.json"
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else {}


def overlay(shipped: Table, own: Table) -> Table:
    """``own`` in the place of ``shipped`` for every (op, dtype, precision, N, K) that it has.

    Above the most tokens of an own key the shipped rows stay, where there are any.
    """
    merged = dict(shipped)
    for key, rows in own.items():
        merged[key] = [*rows, *(row for row in shipped.get(key, ()) if row.M > rows[-1].M)]
    return merged


@cache
def load(slug: str) -> Table:
    """The table of a GPU model, the user's rows over the shipped ones; empty where there is neither."""
    return overlay(_shipped(slug), _read_user(slug))


def forget() -> None:
    """Read the tables again for the next plan that is made. Plans that there are stay as they are."""
    load.cache_clear()


def describe(slug: str) -> list[str]:
    """The tables in use for a GPU model, in words, the user's first."""
    table = load(slug)
    own = sum(row.own for rows in table.values() for row in rows)
    shipped = sum(len(rows) for rows in table.values()) - own
    lines = []
    path = user_path(slug)
    if own:
        try:
            content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # changed since it was read
            content = {}
        versions = [f"{name} {content[name]}" for name in ("torch", "triton") if name in content]
        lines.append(f"yours, {', '.join([f'{own} rows', *versions])}: {path}")
    if shipped:
        lines.append(f"shipped, {shipped} rows{' that yours leaves' if own else ''}: {slug}.json")
    if not own and path is not None and slug != INTERPRETER.slug:
        state = "not in use" if path.exists() else "none"
        lines.append(f"yours, {state}: {path}")
    return lines or ["none: the heuristic decides"]


def find(
    slug: str,
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    precision: str,
    tma: bool,
    gluon: bool = False,
    aligned: bool = True,
) -> Row | None:
    """The row for a shape, or None where the heuristic decides. Beyond the largest M of the table its last row holds,
    unless it is of a kernel for small batches, which would read the weights anew for each of its tiles; a user's last
    row only from :data:`HOLDS_FROM` tokens on. tma, gluon: whether these families can serve; aligned:
    whether rows start at multiples of 16 bytes, as those did that were measured."""
    dtype_name = str(dtype).removeprefix("torch.")
    precision = precision if dtype == torch.float32 else ""
    rows = load(slug).get((op, dtype_name, precision, N, K))
    if not rows:
        return None
    last = rows[-1]
    if M > last.M and last.own and last.M < HOLDS_FROM:
        return None
    row = rows[min(bisect_left([row.M for row in rows], M), len(rows) - 1)]
    if row.settings.family == "small" and (M > row.M or not aligned):
        return None
    return None if (row.settings.family, False) in (("tma", tma), ("gluon", gluon)) else row


def lookup(
    slug: str,
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    precision: str,
    tma: bool,
    gluon: bool = False,
    aligned: bool = True,
) -> Settings | None:
    """The measured settings for a shape, or None; see :func:`find`."""
    row = find(slug, op, M, N, K, dtype, precision, tma, gluon, aligned)
    return None if row is None else row.settings
