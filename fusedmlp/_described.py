"""A module's reading while torch.compile traces a call: a constant that follows from what the traced code saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._stand_in import UnknownAttributeError, blank
from ._stateless import OPTIONS, Reading, read_anew, unread


@torch.compiler.assume_constant_result
def read_described(
    op: str, cls: type[nn.Module], children: Any, parameters: Any, known: Any
) -> tuple[Reading | None, str | None]:
    """``(reading, None)`` of a module of that class with such children (name, class, options), own parameters (names)
    and attributes (name, value); or ``(None, name)`` of an attribute that its forward reads and ``known`` lacks."""
    described = tuple([(name, kind, dict(zip(OPTIONS, options))) for name, kind, options in children])
    try:
        return read_anew(op, blank(cls, described, parameters, known)), None
    except UnknownAttributeError as error:
        return None, error.name
    except Exception as error:  # a class that cannot be made without its constructor
        return unread(f"{cls.__name__} cannot be described: {type(error).__name__}: {error}"), None
