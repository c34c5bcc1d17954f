"""What a grid says as a whole: mean speed-ups, worst cells, and every cell that is lost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import common, plots

TOLERANCE = 0.02  # a cell is lost where fused is slower than the best of the others by more
BASES = ("eager", "compile", "compile_dynamic", "liger")
PASSES = ("forward", "step")


@dataclass(frozen=True)
class Cell:
    """One shape and pass. times: variant -> median, in microseconds."""

    op: str
    pass_: str
    tokens: int
    hidden: int
    intermediate: int
    dtype: str
    times: dict[str, float] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.op} {self.pass_} [{self.tokens}, {self.hidden} -> {self.intermediate}], {self.dtype}"

    @property
    def rival(self) -> str:
        """The fastest of the others."""
        others = {v: us for v, us in self.times.items() if v != "fused"}
        return min(others, key=others.__getitem__)

    @property
    def speedup(self) -> float:
        """Over the best of the others."""
        return self.times[self.rival] / self.times["fused"]


def cells(content: dict[str, Any]) -> list[Cell]:
    """Every cell that fused can be compared in, by graph replay or kernel time as the grid has it.

    Raises:
        BenchError: there is none.
    """
    found = []
    rows = [r for r in content["rows"] if r["metric"] == common.grid_metric(r["tokens"])]
    for key, times in plots.by_cell(rows, plots.GRID).items():
        if times.get("fused") and len(times) > 1:
            found.append(Cell(*key[:6], times))
    if not found:
        raise common.BenchError("this result has no time of fused beside another variant's")
    return found


def cell_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("op", "pass", "tokens", "hidden", "intermediate", "dtype", "metric"))


def union(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The grids of several runs on one GPU model as one, of each cell its latest run; "runs" has them, newest first.

    Raises:
        BenchError: they are of several GPU models.
    """
    runs = sorted(contents, key=lambda content: str(content["date"]))
    if len({content["gpu"] for content in runs}) > 1:
        raise common.BenchError(f"grids of several GPUs: {', '.join(sorted({content['gpu'] for content in runs}))}")
    latest: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for content in runs:
        of_run: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in content["rows"]:
            of_run.setdefault(cell_of(row), []).append(row)
        latest |= of_run
    return {**runs[-1], "rows": [row for rows in latest.values() for row in rows], "runs": runs[::-1]}


def lost(found: list[Cell], pass_: str | None = None) -> list[Cell]:
    """The cells in which fused is slower than the best of the others by more than :data:`TOLERANCE`, worst first."""
    slow = [c for c in found if c.times["fused"] > (1 + TOLERANCE) * c.times[c.rival] and pass_ in (None, c.pass_)]
    return sorted(slow, key=lambda cell: cell.speedup)


def markdown(content: dict[str, Any]) -> str:
    """The grid as Markdown: means and worst cells of each pass, then all that is lost."""
    found = cells(content)
    lines = ["| pass | over | geometric mean | cells | worst |", "| --- | --- | ---: | ---: | --- |"]
    for pass_ in PASSES:
        for base in BASES:
            pairs = [(c.times[base] / c.times["fused"], c) for c in found if c.pass_ == pass_ and base in c.times]
            if pairs:
                mean = statistics.geometric_mean(ratio for ratio, _ in pairs)
                ratio, worst = min(pairs, key=lambda pair: pair[0])
                lines.append(f"| {pass_} | {base} | {mean:.3f} | {len(pairs)} | {ratio:.3f} at {worst} |")
    counts = []
    for pass_ in PASSES:
        of_pass = sum(c.pass_ == pass_ for c in found)
        if of_pass:
            counts.append(f"{len(lost(found, pass_))} of {of_pass} in the {pass_}")
    lines += ["", f"Cells more than {TOLERANCE:.0%} slower than the best of the others: {', '.join(counts)}."]
    slow = lost(found)
    if slow:
        lines += ["", "| lost | fused, us | best of the others, us | speed-up |", "| --- | ---: | ---: | ---: |"]
        for c in slow:
            lines.append(f"| {c} | {c.times['fused']:.1f} | {c.times[c.rival]:.1f} ({c.rival}) | {c.speedup:.3f} |")
    return "\n".join(lines)
