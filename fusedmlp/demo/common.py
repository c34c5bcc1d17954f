"""What both parts of the demo share: device choice, tables, timing."""

from __future__ import annotations

import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

WIDTH = 100


class DemoError(RuntimeError):
    """The demo cannot run as asked on this machine."""


def resolve_device(name: str | None) -> torch.device:
    """The device of that name; None means cuda where there is one. Raises DemoError where cuda is asked for
    in vain."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"--device cuda: torch {torch.__version__} sees no CUDA device here; use --device cpu")
    return torch.device(name)


def device_line(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU with {torch.get_num_threads()} threads, torch {torch.__version__}"


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_cpu_line(what: str) -> str:
    """What ran the fused layers on CPU tensors, and so what ``what`` of a comparison is worth."""
    if interpreted():
        return f"  (on this CPU the kernels run in Triton's interpreter: {what} is not a GPU's)"
    return f"  (on a CPU both run PyTorch's own operators, the reference path: {what} is noise)"


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * min(len(text), WIDTH)}")


def wrapped(text: str, indent: str = "  ") -> None:
    for line in text.splitlines():
        print(textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  "))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right, the last to the left when it is
    prose."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    lines.insert(1, "  " + "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread inside: on small matrices threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved_ms(variants: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median wall-clock milliseconds of each variant; the variants take turns, so that a slow moment hits
    them all."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 2):
        for name, fn in variants.items():
            synchronize(device)
            begin = time.perf_counter()
            fn()
            synchronize(device)
            if turn >= 2:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}
