"""How far a run is, on stderr: a bar of tqdm where it is installed, else a line for every shape."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any, Protocol


class Progress(Protocol):
    """What :func:`fusedmlp.tune.tune` tells of its way."""

    def start(self, total: int) -> None:
        """``total`` shapes will be measured."""

    def begin(self, text: str) -> None:
        """The next shape."""

    def note(self, text: str) -> None:
        """Something left out or failed."""

    def end(self, text: str) -> None:
        """The shape is done, with its outcome."""

    def close(self) -> None:
        """No more shapes."""


class Silent:
    """Says nothing."""

    def start(self, total: int) -> None: ...

    def begin(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line a shape, with the time that remains at the pace so far."""

    def start(self, total: int) -> None:
        self.total, self.done, self.since = total, 0, time.monotonic()

    def begin(self, text: str) -> None:
        self.shape = text

    def note(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        self.done += 1
        left = (time.monotonic() - self.since) / self.done * (self.total - self.done)
        width = len(str(self.total))
        ahead = f" ({minutes(left)} left)" if self.done < self.total else ""
        line = f"[{self.done:{width}d}/{self.total}] {self.shape}: {text}{ahead}"
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class Bar:
    """tqdm's bar."""

    def __init__(self, tqdm: Any) -> None:
        self.tqdm = tqdm

    def start(self, total: int) -> None:
        self.bar = self.tqdm(total=total, unit="shape", file=sys.stderr)

    def begin(self, text: str) -> None:
        self.shape = text
        self.bar.set_description(text)

    def note(self, text: str) -> None:
        self.tqdm.write(f"  {text}", file=sys.stderr)

    def end(self, text: str) -> None:
        self.tqdm.write(f"{self.shape}: {text}", file=sys.stderr)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def default() -> Progress:
    try:
        return Bar(import_module("tqdm").tqdm)
    except ImportError:
        return Lines()
