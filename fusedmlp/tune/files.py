"""The settings table as a file: read for resuming, written after every shape in one step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..settings import tables

Key = tuple[Any, ...]
VERSIONS = ("torch", "triton")


class TuneError(RuntimeError):
    """A request that cannot be met: what was given, what is allowed, and what to do."""


class DeviceLost(RuntimeError):
    """A kernel broke the CUDA context: this process can measure nothing more."""


@dataclass(frozen=True)
class Machine:
    """What a measurement holds for: the GPU by its name, and the versions of PyTorch and Triton. ``hopper``: whether it
    is one, where cuBLAS serves ``linear_relu`` by an epilogue."""

    gpu: str
    torch: str
    triton: str
    hopper: bool = True


def key_of(row: dict[str, Any]) -> Key:
    return tuple(row[name] for name in ("op", "dtype", "precision", "M", "N", "K"))


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows, and the old ones of shapes that were not measured this time."""
    new = list(new)
    measured = {key_of(row) for row in new}
    return [row for row in old if key_of(row) not in measured] + new


def write_table(path: Path, head: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Writes ``{**head, "rows": rows}``, a row a line, in one step: killed at any moment, it leaves a whole file.

    Raises:
        OSError: the file cannot be written; the one before it is as it was.
    """
    lines = ",\n".join(json.dumps(row) for row in rows)
    fields = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in head.items())
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    half = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f'{{{fields}"rows": [\n{lines}\n]}}\n')
            file.flush()
            os.fsync(file.fileno())
        half.chmod(0o644)  # a temporary file is its owner's alone
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def today() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass
class TableFile:
    """The table that a run writes.

    Attributes:
        path: the file. machine: what this run measures on. method: how, in words.
        rows: what the file holds, by :func:`key_of`. Rows of other versions name them; the others are of the head's.
        anew: whether the first write sets the old file aside, as ``<file>.bak``.
    """

    path: Path
    machine: Machine
    method: str
    rows: dict[Key, dict[str, Any]] = field(default_factory=dict)
    anew: bool = False

    @classmethod
    def open(cls, path: Path, machine: Machine, method: str, resume: bool = True) -> TableFile:
        """The file of a run, with what an earlier one measured.

        Raises:
            TuneError: it cannot be read or written, is no settings table, or is another GPU's.
        """
        _check_writable(path)
        found = cls(path, machine, method, anew=not resume and path.exists())
        if not resume or not path.exists():
            return found
        try:
            text = path.read_text(encoding="utf-8")
            tables.parse(text)
            content = json.loads(text)
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise TuneError(
                f"{path} is there and is no settings table ({reason}); give --restart (it is kept as {path.name}.bak) "
                "or another --out"
            ) from None
        gpu = content.get("gpu", machine.gpu)
        if gpu != machine.gpu:
            raise TuneError(
                f"{path} holds settings of {gpu}, and this GPU is {machine.gpu}; give another --out, or --restart "
                f"(it is kept as {path.name}.bak)"
            )
        found._take_in(content)
        return found

    def _take_in(self, content: dict[str, Any]) -> None:
        """Rows of a file that this run has not got."""
        versions = {name: content[name] for name in VERSIONS if name in content}
        for row in content["rows"]:
            row = {**row, **{name: row.get(name, versions.get(name, "unknown")) for name in VERSIONS}}
            if self.is_current(row):
                row = {name: value for name, value in row.items() if name not in VERSIONS}
            self.rows.setdefault(key_of(row), row)

    def _take_in_others(self) -> None:
        """What another run has written meanwhile: two GPUs of one model share a file."""
        try:
            text = self.path.read_text(encoding="utf-8")
            tables.parse(text)
        except (OSError, ValueError):  # none yet, or not a table any more: ours replaces it
            return
        self._take_in(json.loads(text))

    def is_current(self, row: dict[str, Any]) -> bool:
        """Whether a row was measured with this run's versions."""
        return all(row.get(name, getattr(self.machine, name)) == getattr(self.machine, name) for name in VERSIONS)

    def has(self, key: Key) -> bool:
        """Whether a shape needs no measuring: this GPU's row of these versions is there."""
        return key in self.rows and self.is_current(self.rows[key])

    def add(self, row: dict[str, Any]) -> None:
        """Takes a row in and writes the file.

        Raises:
            TuneError: it cannot be written (a full disk); what was written before is as it was.
        """
        self.rows[key_of(row)] = row
        machine = self.machine
        head = {"gpu": machine.gpu, "torch": machine.torch, "triton": machine.triton}
        try:
            with _alone(self.path):
                if self.anew:
                    os.replace(self.path, self.path.with_name(f"{self.path.name}.bak"))
                    self.anew = False
                self._take_in_others()
                write_table(self.path, {**head, "date": today(), "method": self.method}, self.rows.values())
        except OSError as error:
            raise TuneError(
                f"cannot write {self.path}: {error.strerror or error}; rows measured before are kept there"
            ) from None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other run writes the file; where the system has no such locks, without them."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)  # which is there, and stays when the file is replaced
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _check_writable(path: Path) -> None:
    """Before anything is measured: hours of it must not end at a file that cannot be written."""
    try:
        if path.is_dir():
            raise TuneError(f"the table {path} is a folder; name a file in it, e.g. {path / 'settings.json'}")
        if not path.parent.is_dir():
            raise TuneError(
                f"the table {path}: there is no folder {path.parent}; make it, or name a file in another one"
            )
        probe = path.with_name(f".{path.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
        if path.exists():
            with open(path, "a", encoding="utf-8"):
                pass
    except OSError as error:
        reason = error.strerror or error
        raise TuneError(f"the table {path} cannot be written: {reason}; name a file in a folder of yours") from None
