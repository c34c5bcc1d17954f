"""Does a forward that is traced switch gradients or autocast? A trace holds operations, and not under which mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DEVICES = ("cpu", "cuda")


def modes() -> tuple[object, ...]:
    """The modes of this thread that change what the same operations mean."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@contextmanager
def all_modes(on: bool) -> Iterator[None]:
    """Gradients and autocast all on, or all off: of two traces, one under each, every switch changes one."""
    before = [torch.is_autocast_enabled(kind) for kind in _DEVICES]
    try:
        for kind in _DEVICES:
            torch.set_autocast_enabled(kind, on)
        with torch.inference_mode(False), torch.set_grad_enabled(on):
            yield
    finally:
        for kind, enabled in zip(_DEVICES, before):
            torch.set_autocast_enabled(kind, enabled)
