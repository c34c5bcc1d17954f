"""Compiling ahead: what the processes compile is what a run launches, and a process that fails ends nothing."""

from __future__ import annotations

import os
import sys
import time
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.aot import DEVICES, Recorded, pretended
from support.gluon import needs_gluon

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import ahead  # noqa: E402
from fusedmlp.settings.types import GLUON_ONLY_OPS, Settings  # noqa: E402
from fusedmlp.tune import measure  # noqa: E402
from fusedmlp.tune.candidates import CANDIDATES, DTYPES  # noqa: E402

H200 = DEVICES["nvidia-h200"]
make = measure.Problem.make


def candidates_at(op: str, shape: ahead.Shape, dtype: str = "bfloat16") -> tuple[Settings, ...]:
    with (
        mock.patch.object(measure, "info", return_value=H200),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        return measure.candidates_for(op, *shape, DTYPES[dtype][0])


def launched(op: str, candidate: Settings, shape: ahead.Shape, dtype: str) -> list[Recorded]:
    with pretended(H200) as recorded, measure.precision_of(dtype):
        p = make(*shape, DTYPES[dtype][0], "meta")
        measure.run_ours(op, measure.plan_of(op, p, candidate), p)
        return list(recorded)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[needs_gluon] if op in GLUON_ONLY_OPS else []) for op in CANDIDATES]
)
def test_a_candidate_compiles_to_one_kernel_for_all_shapes(op: str) -> None:
    """The types, constants, divisibility and options of every launch are those of the shape that stands in."""
    shapes = [*product((1, 37, 64), [(384, 1536)]), (1024, (1152, 4304)), (16384, (8192, 28672)), (64, (72, 136))]
    seen = 0
    for tokens, width in shapes:
        shape = (tokens, *width)
        for candidate in candidates_at(op, shape):
            if op in GLUON_ONLY_OPS and candidate.family == "pair":
                continue  # it is what the table or the heuristic says of the shape
            small = ahead.stand_in(candidate, shape)
            assert small[0] <= 128 and small[1] < 512 and small[2] < 1024
            assert launched(op, candidate, shape, "bfloat16") == launched(op, candidate, small, "bfloat16")
            seen += candidate.family != "pair"
    assert seen >= 12


def test_other_dtypes_and_rows_without_tma() -> None:
    for op, dtype, shape in (("glu", "tf32", (512, 100, 200)), ("linear_act", "bfloat16", (512, 99, 201))):
        for candidate in candidates_at(op, shape, dtype):
            small = ahead.stand_in(candidate, shape)
            assert launched(op, candidate, shape, dtype) == launched(op, candidate, small, dtype)


def test_a_shape_of_another_kind_is_another_kernel() -> None:
    """What the comparison above would miss if it saw nothing of divisibility."""
    tile = next(c for c in CANDIDATES["glu"] if c.family == "tma")
    assert launched("glu", tile, (64, 256, 512), "bfloat16") != launched("glu", tile, (64, 264, 512), "bfloat16")


def test_kernels_of_many_shapes_are_few() -> None:
    shapes = [(M, D, H) for M in (1, 64, 1024, 8192) for D, H in ((384, 1536), (768, 3072), (4096, 14336))]
    with (
        mock.patch.object(measure, "info", return_value=H200),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        tasks = ahead.kernel_tasks(CANDIDATES, shapes, "bfloat16")
    wanted = {(op, c) for op in CANDIDATES for shape in shapes for c in candidates_at(op, shape)}
    wanted -= {(op, Settings("pair")) for op in ("glu_grads", "glu_weight_grads")}
    assert {arguments[:2] for _, arguments in tasks} == wanted and len(tasks) == len(wanted)


def test_compiling_launches_nothing() -> None:
    warmed: list[object] = []

    class Kernel:
        def warmup(self, *args: object, **options: object) -> Kernel:
            warmed.append((args, options))
            return self

        @property
        def run(self) -> None:
            warmed.append("launcher")

    from fusedmlp.launch import Launch

    x = torch.zeros(4)
    Launch(Kernel(), 7, (64, "relu"), num_warps=8).compile(0, x, None, 5)
    assert warmed == [((x, None, 5, 64, "relu"), {"grid": (7,), "num_warps": 8}), "launcher"]


def work(folder: str, name: str) -> None:
    if name == "raise":
        raise ValueError("no such kernel")
    if name == "die":
        time.sleep(1)
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    (Path(folder) / name).write_text(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])


def test_processes_work_and_one_that_raises_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks: list[ahead.Task] = [(work, (str(tmp_path), name)) for name in ("a", "raise", "b")]
    assert ahead.run(tasks, 2, 120) == 2
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "1"
    said = capfd.readouterr()
    assert "not compiled ahead: ValueError: no such kernel" in said.err and "2 of 3" in said.out
    assert ahead.run([], 4) == 0


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_process_that_dies_or_hangs_ends_nothing(tmp_path: Path, fault: str) -> None:
    begin = time.monotonic()
    assert ahead.run([(work, (str(tmp_path), fault))], 1, 20 if fault == "die" else 4) == 0
    assert time.monotonic() - begin < 60
