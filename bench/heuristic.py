"""How far the heuristic's settings are from the table's, by the times that sweeps measured: the table hidden."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import common
from fusedmlp.settings import heuristic
from fusedmlp.settings.device import DeviceInfo
from fusedmlp.settings.types import GLUON_OPS, Settings
from fusedmlp.tune.candidates import choose, sizes

# A Hopper GPU of which no table is shipped.
NO_TABLE = DeviceInfo("nvidia-unknown", (9, 0), 132)


@dataclass(frozen=True)
class Distance:
    """One kernel at one shape. heuristic_us over table_us: the measured time of each choice."""

    op: str
    shape: tuple[int, int, int]
    chosen: str
    heuristic_us: float
    table_us: float

    @property
    def ratio(self) -> float:
        return self.heuristic_us / self.table_us

    def __str__(self) -> str:
        M, D, H = self.shape
        return f"{self.op} [{M}, {D} -> {H}]: {self.chosen}, {self.heuristic_us:.1f} us for {self.table_us:.1f}"


@dataclass
class Distances:
    """found: where the heuristic's choice was measured. unswept: shapes swept before there was its family.
    unmeasured: the others, where its very settings are no candidate, or one that was wrong or did not fit."""

    found: list[Distance] = field(default_factory=list)
    unswept: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(d.ratio for d in self.found)

    def __str__(self) -> str:
        if not self.found:
            return "no choice of the heuristic was measured"
        worst = max(self.found, key=lambda d: d.ratio)
        lines = [
            f"the heuristic's choice takes {self.median:.3f} of the table's at the median of {len(self.found)} kernels "
            f"and shapes; at worst {worst.ratio:.3f}: {worst}"
        ]
        for op in dict.fromkeys(d.op for d in self.found):
            of_op = [d for d in self.found if d.op == op]
            far = max(of_op, key=lambda d: d.ratio)
            median = statistics.median(d.ratio for d in of_op)
            lines.append(f"  {op:13s} {len(of_op):4d}: median {median:.3f}, worst {far.ratio:.3f} at {far}")
        lines += [f"  not measured: {text}" for text in self.unmeasured]
        if self.unswept:
            lines.append(f"  {len(self.unswept)} shapes were swept before there was the family that it takes there")
        return "\n".join(lines)


def measured(paths: Iterable[Path]) -> dict[tuple[str, tuple[int, int, int]], dict[str, float]]:
    """(op, (tokens, hidden, intermediate)) -> settings in words -> microseconds.

    Of a shape in several files the latest run counts. A candidate looked at once and timed no further is left out.
    """
    found: dict[tuple[str, tuple[int, int, int]], dict[str, float]] = {}
    for content in sorted((common.load(path) for path in paths), key=lambda content: str(content["date"])):
        run: dict[tuple[str, tuple[int, int, int]], dict[str, float]] = {}
        for r in content["rows"]:
            if r["n"] > 1:
                shape = (r["tokens"], r["hidden"], r["intermediate"])
                run.setdefault((r["op"], shape), {})[r["variant"]] = r["median"]
        found |= run
    return found


def distances(paths: Iterable[Path], info: DeviceInfo = NO_TABLE) -> Distances:
    """Of every kernel and shape of these sweeps, in bfloat16."""
    result = Distances()
    for (op, shape), times in measured(paths).items():
        M, (N, K) = shape[0], sizes(op, *shape[1:])
        family = heuristic.family(op, M, N, K, torch.bfloat16, True, op in GLUON_OPS, info)
        chosen = str(heuristic.settings(op, M, N, K, torch.bfloat16, family, info))
        where = f"{op} [{M}, {shape[1]} -> {shape[2]}]: {chosen}"
        # The rule of the tables asks of settings nothing but their family.
        pairs: list[tuple[Settings, float]] = [(Settings(name.split()[0]), us) for name, us in times.items()]
        table = choose(op, M, torch.bfloat16, pairs)
        if chosen in times and table is not None:
            result.found.append(Distance(op, shape, chosen, times[chosen], table.us))
        elif family not in {name.split()[0] for name in times}:
            result.unswept.append(where)
        else:
            result.unmeasured.append(where)
    return result
