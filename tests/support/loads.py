"""Which kernels Triton loads onto a GPU, whether it compiled them or found them on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton


@contextmanager
def loads() -> Iterator[list[str]]:
    """The names of the kernels that are loaded inside, in order."""
    found: list[str] = []

    def hook(module: Any, function: Any, name: str, *rest: Any) -> None:
        found.append(name)

    chain = triton.knobs.runtime.kernel_load_end_hook
    chain.add(hook)
    try:
        yield found
    finally:
        chain.remove(hook)
