"""Tuning: measures candidate settings on this GPU and writes a settings table that the package reads.

``python -m fusedmlp tune``, or :func:`tune`. Where the package looks for the table: :mod:`fusedmlp.settings.tables`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..settings import tables
from ..settings.device import slug_of
from .candidates import CANDIDATES, DTYPES, LAYERS, choose, sizes
from .files import DeviceLost, Machine, TableFile, TuneError
from .progress import Progress, Silent, default, minutes

if TYPE_CHECKING:
    from .measure import Measured

__all__ = ["CANDIDATES", "LAYERS", "Machine", "TuneError", "TuneReport", "tune"]

TOKENS = (1, 16, 32, 64, 128, 1024, 8192)
# A row may be a compilation of its kernel, and new sequence lengths must meet few of them.
MAX_TOKENS = 8
Measure = Callable[[str, int, int, int, str], "Measured"]  # op, M, D, H, dtype


@dataclass(frozen=True)
class Job:
    """One kernel at one shape: a layer D -> H with M tokens."""

    op: str
    dtype: str  # a name of DTYPES
    M: int
    D: int
    H: int

    @property
    def row(self) -> dict[str, Any]:
        dtype, precision = DTYPES[self.dtype]
        N, K = sizes(self.op, self.D, self.H)
        name = str(dtype).removeprefix("torch.")
        return {"op": self.op, "dtype": name, "precision": precision, "M": self.M, "N": N, "K": K}

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.row.values())

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} [{self.M}, {self.D} -> {self.H}]"


@dataclass
class TuneReport:
    """What a run did.

    Attributes:
        out: the table. measured: shapes that got a row. there: that had one already.
        failed: shapes for which nothing could be measured, each with the reason. left: not reached within the budget.
        read: whether the package finds the table by itself, as the environment is now.
        seconds: wall-clock time.
    """

    out: Path
    measured: list[Job] = field(default_factory=list)
    there: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)
    left: list[Job] = field(default_factory=list)
    read: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{len(self.measured)} measured in {minutes(self.seconds)}, {len(self.there)} were there: {self.out}"]
        if self.failed:
            lines.append(f"{len(self.failed)} without a row, so that the shipped table or the heuristic decides:")
            lines += [f"  {job}: {reason}" for job, reason in self.failed]
        if self.left:
            lines.append(
                f"the budget is spent with {len(self.left)} left; the same command goes on with {self.left[0]}"
            )
        if not self.read:
            lines.append(f"to use the table: export {tables.VARIABLE}={self.out.resolve()}")
        return "\n".join(lines)


def tune(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int] = TOKENS,
    dtypes: Sequence[str] = ("bfloat16",),
    layers: Sequence[str] = ("geglu", "mlp"),
    ops: Sequence[str] | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    progress: Progress | bool = True,
    *,
    budget: float | None = None,
    measure: Measure | None = None,
    machine: Machine | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneReport:
    """Measures every kernel of the layers at every shape, and writes each choice at once.

    Args:
        shapes: the widths of the layers, (hidden, intermediate).
        tokens: at most 8 token counts. A row also serves the counts above the one before it, up to its own.
        dtypes: names: bfloat16, float16, float32 (products in full), tf32 (float32 with TF32 products).
        layers: geglu and swiglu (one set of kernels, whatever the activation), mlp (two layers), linear.
        ops: of the kernels of these layers only these.
        out: the table; None for where the package reads it.
        resume: leave out what the file has from this GPU and these versions of PyTorch and Triton. False sets an
            old file aside and starts anew.
        progress: True for a bar or lines on stderr, False for silence, or an object of one's own.
        budget: seconds after which no further shape is begun.
        measure, machine, clock: stand-ins, for tests.

    Raises:
        TuneError: an unknown name, a shape that is none, no GPU, or a file that cannot be read or written.
    """
    jobs = plan_jobs(shapes, tokens, dtypes, layers, ops)
    if budget is not None and not budget > 0:
        raise TuneError(f"the budget must be above 0, got {budget / 60:g} minutes")
    if machine is None:
        machine = this_machine()
    jobs = served(jobs, machine)
    method = "stand-in"
    if measure is None:
        from . import measure as measuring

        measure, method = measuring.measure, measuring.METHOD
    path = default_out(machine) if out is None else Path(out)
    table = TableFile.open(path, machine, method, resume)
    _check_token_counts(table, jobs)
    read = path.resolve() == _read_path(machine)
    report = TuneReport(path, read=read, there=[job for job in jobs if table.has(job.key)])
    todo = [job for job in jobs if not table.has(job.key)]
    shown: Progress = default() if progress is True and todo else Silent() if isinstance(progress, bool) else progress
    begun = clock()
    shown.start(len(todo))
    try:
        for i, job in enumerate(todo):
            if budget is not None and clock() - begun >= budget:
                report.left = todo[i:]
                break
            shown.begin(str(job))
            outcome = _measure_one(job, measure, table, report, shown)
            shown.end(outcome)
    finally:
        shown.close()
        report.seconds = clock() - begun
        _use_new_table()
    return report


def _measure_one(job: Job, measure: Measure, table: TableFile, report: TuneReport, shown: Progress) -> str:
    """Measures, chooses and writes one row; returns the outcome in words."""
    try:
        found = measure(job.op, job.M, job.D, job.H, job.dtype)
    except DeviceLost as error:
        done = f"the {len(report.measured)} rows measured before it are kept"
        raise TuneError(f"{error}; {done}; run again without that kernel (--ops)") from error
    except RuntimeError as error:
        found = None
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    if found is not None:
        for candidate, why in found.left_out:
            shown.note(f"left out: {job} {candidate}: {why}")
        choice = choose(job.op, job.M, DTYPES[job.dtype][0], found.medians)
        if choice is not None:
            counts = {"timed": len(found.times), "left_out": len(found.left_out)}
            table.add({**job.row, **choice.row(), **counts})
            report.measured.append(job)
            return f"{choice.us:.1f} us, {choice.settings}"
        reason = f"no fused candidate of {len(found.times) + len(found.left_out)} was right and fit"
    report.failed.append((job, reason))
    return f"no row: {reason}"


def _use_new_table() -> None:
    """Plans made from here on follow what was written."""
    from .. import plan

    tables.forget()
    plan.clear()


def _one_of(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in given if name not in allowed]
    if unknown or not given:
        shown = f"unknown {what} {', '.join(map(repr, unknown))}" if unknown else f"no {what} given"
        raise TuneError(f"{shown}; allowed are: {', '.join(allowed)}")


def _is_count(n: object) -> bool:
    return type(n) is int and n > 0


def plan_jobs(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    dtypes: Sequence[str],
    layers: Sequence[str],
    ops: Sequence[str] | None = None,
) -> list[Job]:
    """Everything to measure, each once, fewer tokens first.

    Raises:
        TuneError: what was given is unknown, empty or no positive whole number.
    """
    _one_of("layer", layers, list(LAYERS))
    _one_of("dtype", dtypes, list(DTYPES))
    of_layers = list(dict.fromkeys(op for layer in layers for op in LAYERS[layer]))
    if ops is not None:
        _one_of("op", ops, list(CANDIDATES))
        foreign = [op for op in ops if op not in of_layers]
        if foreign:
            raise TuneError(
                f"{', '.join(foreign)}: no kernel of {', '.join(layers)}, which have: {', '.join(of_layers)}; name "
                "its layer too"
            )
        of_layers = [op for op in of_layers if op in ops]
    if not shapes or not all(len(shape) == 2 and all(map(_is_count, shape)) for shape in shapes):
        raise TuneError(f"widths are pairs of whole numbers, hidden and intermediate, e.g. 768,3072; got {shapes}")
    if not tokens or not all(map(_is_count, tokens)) or len(set(tokens)) > MAX_TOKENS:
        raise TuneError(f"tokens are 1 to {MAX_TOKENS} whole numbers of 1 or more; got {list(tokens)}")
    found = [
        Job(op, dtype, M, D, H)
        for D, H in shapes
        for dtype in dtypes
        for op in of_layers
        for M in sorted(set(tokens))  # a stop within a kernel leaves its larger batches to the shipped rows
    ]
    return list({job.key: job for job in found}.values())


def served(jobs: Sequence[Job], machine: Machine) -> list[Job]:
    """Without what the GPU has no use for: ``linear_relu`` stands for ``linear_act`` on Hopper alone, in 16 bits.

    Raises:
        TuneError: nothing is left.
    """
    found = [job for job in jobs if job.op != "linear_relu" or (machine.hopper and DTYPES[job.dtype][0].itemsize == 2)]
    if not found:
        raise TuneError("linear_relu is a kernel of its own on Hopper GPUs, in bfloat16 and float16; name linear_act")
    return found


def _check_token_counts(table: TableFile, jobs: Sequence[Job]) -> None:
    counts: dict[tuple[Any, ...], set[int]] = {}
    for op, dtype, precision, M, N, K in [*table.rows, *(job.key for job in jobs)]:
        counts.setdefault((op, dtype, precision, N, K), set()).add(M)
    for key, found in counts.items():
        if len(found) > MAX_TOKENS:
            raise TuneError(
                f"{table.path} would have {len(found)} token counts for {key[0]} {key[1]} N={key[3]} K={key[4]}: "
                f"{sorted(found)}; at most {MAX_TOKENS}, since each may be a compilation. Give --tokens that are "
                "there, or --restart"
            )


def this_machine() -> Machine:
    """The current GPU and the versions that measure on it.

    Raises:
        TuneError: no NVIDIA GPU of compute capability 8.0 or newer, no Triton, or its interpreter is on.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "sees none" if built else "is built without CUDA"
        raise TuneError(f"tuning measures on a GPU, and torch {torch.__version__} {why}; run it where the layers run")
    from ..plan import MIN_CAPABILITY

    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if torch.version.hip is not None or capability < MIN_CAPABILITY:
        raise TuneError(f"{name}: the kernels need an NVIDIA GPU of compute capability {MIN_CAPABILITY[0]}.0 or newer")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise TuneError("TRITON_INTERPRET=1 runs kernels on the CPU; unset it to tune")
    try:
        from triton import __version__ as triton_version
    except ImportError:
        raise TuneError("Triton is not installed, and the kernels are Triton's; pip install triton") from None
    return Machine(name, torch.__version__, triton_version, capability[0] == 9)


def _read_path(machine: Machine) -> Path | None:
    """The table that the package reads on this GPU, resolved."""
    try:
        path = tables.user_path(slug_of(machine.gpu))
    except RuntimeError:  # no home folder
        return None
    return path and path.resolve()


def default_out(machine: Machine) -> Path:
    """Where the package will read the table of this GPU. Makes the cache folder.

    Raises:
        TuneError: the variable turns user tables off, or the folder cannot be made.
    """
    try:
        path = tables.user_path(slug_of(machine.gpu))
        if path is None:
            raise TuneError(
                f"{tables.VARIABLE} is set empty, so that no table of yours is read; unset it or give --out"
            )
        if tables.VARIABLE not in os.environ:
            path.parent.mkdir(parents=True, exist_ok=True)
    except TuneError:
        raise
    except (OSError, RuntimeError) as error:
        raise TuneError(f"no folder for the table: {error}; give --out FILE") from None
    return path
