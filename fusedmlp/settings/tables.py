"""Measured settings, one JSON file a GPU model: ``<slug>.json`` beside this module.

``{"gpu": ..., "rows": [{"op", "dtype", "precision", "M", "N", "K", "settings": {...}}, ...]}``. A row stands for its
N and K exactly and for the M above the row before it, up to its own, so that a new token count needs no new row.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from functools import cache
from importlib.resources import files

import torch

from .types import FAMILIES, OPS, SMALL_TOKENS, Settings

_Key = tuple[str, str, str, int, int]


def parse(text: str) -> dict[_Key, list[tuple[int, Settings]]]:
    """The rows of a table, by (op, dtype, precision, N, K), each list sorted by M.

    Raises:
        ValueError: a row names an unknown op, family or field.
    """
    table: dict[_Key, list[tuple[int, Settings]]] = {}
    for row in json.loads(text)["rows"]:
        try:
            settings = Settings(**row["settings"])
        except TypeError as error:
            raise ValueError(f"settings table: {error} in row {row}") from None
        if row["op"] not in OPS or settings.family not in FAMILIES:
            raise ValueError(f"settings table: unknown op or family in row {row}")
        key = (row["op"], row["dtype"], row["precision"], row["N"], row["K"])
        table.setdefault(key, []).append((row["M"], settings))
    for rows in table.values():
        rows.sort(key=lambda row: row[0])
    return table


@cache
def load(slug: str) -> dict[_Key, list[tuple[int, Settings]]]:
    """The table of a GPU model; empty where none is shipped."""
    path = files(__package__) / f"{slug}.json"
    return parse(path.read_text()) if path.is_file() else {}


def lookup(
    slug: str, op: str, M: int, N: int, K: int, dtype: torch.dtype, precision: str, tma: bool, gluon: bool = False
) -> Settings | None:
    """The measured settings for a shape, or None; beyond the largest M of the table its last row holds."""
    dtype_name = str(dtype).removeprefix("torch.")
    precision = precision if dtype == torch.float32 else ""
    rows = load(slug).get((op, dtype_name, precision, N, K))
    if not rows:
        return None
    at = min(bisect_left([m for m, _ in rows], M), len(rows) - 1)
    settings = rows[at][1]
    if settings.family == "small" and M > SMALL_TOKENS:
        return None
    return None if (settings.family, False) in (("tma", tma), ("gluon", gluon)) else settings
