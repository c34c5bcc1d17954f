"""A stand-in for the measuring of fusedmlp.tune, with costs that follow from the shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fusedmlp.settings import tables
from fusedmlp.settings.types import Settings
from fusedmlp.tune import Machine, measure, tune

TOY = Machine("NVIDIA Toy", "2.9", "3.6")
PAIR, SMALL, LARGE = Settings("pair"), Settings("tma", 64, 64, 64), Settings("tma", 128, 128, 64)


class Fake:
    """A measurer with costs that follow from the shape; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, op: str, M: int, D: int, H: int, dtype: str) -> measure.Measured:
        self.asked.append((op, M, D, H, dtype))
        cost = 1.0 + M * D / 1e3
        return measure.Measured(
            [(PAIR, [cost + 10] * 3), (SMALL, [cost, cost, 999.0]), (LARGE, [cost + 5, cost - 0.5, cost + 5])],
            [(Settings("gluon"), "OutOfResources: shared memory")],
        )


def run(fake: Any, out: Path, tokens: Any = (16, 128), machine: Machine = TOY, ops: Any = ("glu",), **more: Any) -> Any:
    arguments = {"shapes": [(768, 3072)], "tokens": tokens, "ops": ops, "out": out, "progress": False, **more}
    return tune(measure=fake, machine=machine, **arguments)


def rows_of(path: Path) -> list[dict[str, Any]]:
    tables.parse(path.read_text())
    return json.loads(path.read_text())["rows"]
