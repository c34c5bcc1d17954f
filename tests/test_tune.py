"""Tuning with a stand-in for the measuring: choice, resuming, the file, the budget, progress."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.tuning import LARGE, PAIR, SMALL, TOY, Fake, rows_of, run

from fusedmlp import calculate_settings, settings
from fusedmlp.settings import tables
from fusedmlp.settings.device import DeviceInfo
from fusedmlp.settings.types import ALONE, GLUON_ONLY_OPS, GLUON_OPS, OPS, PRODUCTS, SMALL_OPS, SMALL_TOKENS, Settings
from fusedmlp.tune import Machine, TuneError, candidates, files, measure, progress
from fusedmlp.tune.candidates import (
    BUSY,
    CANDIDATES,
    CUBLAS_MUST_SAVE,
    DTYPES,
    LAYERS,
    LEVEL,
    MUST_SAVE_OF_BUSY,
    NOT_TABLED,
    PAIR_IS_FREE,
    PAIR_MAY_SERVE,
    PAIR_MUST_SAVE,
    PAIR_MUST_SAVE_SHARE,
    PASS,
    choose,
)

BF16 = torch.bfloat16


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    tables.forget()


# ---------------------------------------------------------------------------------------------- the choice


def test_the_fastest_fused_kernel_is_taken():
    choice = choose("glu", 512, BF16, [(PAIR, 20.0), (LARGE, 12.0), (SMALL, 11.0)])
    assert choice is not None
    assert (choice.settings, choice.us, choice.pair_us, choice.fused_us) == (SMALL, 11.0, 20.0, None)
    assert choose("glu", 512, BF16, []) is None


@pytest.mark.parametrize("op", OPS)
def test_a_pair_must_save_its_launch_and_serves_some_ops(op: str):

    def takes_pair(saved: float, dtype: torch.dtype = BF16, tokens: int = 257, fused: float = 200.0) -> bool:
        choice = choose(op, tokens, dtype, [(PAIR, fused - saved), (SMALL, fused)])
        assert choice is not None and choice.pair_us == fused - saved
        assert choice.fused_us == (fused if choice.settings == PAIR else None)
        return choice.settings == PAIR

    must_save = 0.0 if op in PAIR_IS_FREE else PAIR_MUST_SAVE
    if op == "linear_act":  # it works in place, and must save a share where the device is busy
        must_save = 200.0 * PAIR_MUST_SAVE_SHARE
    assert not takes_pair(must_save - 1)
    assert takes_pair(must_save + 1) is (op in PAIR_MAY_SERVE)
    # With few tokens the hidden layer that it holds is small; cuBLAS alone must save what its call costs the host.
    few = MUST_SAVE_OF_BUSY if op in ALONE or must_save else 0.0
    assert takes_pair(few + 0.1, tokens=256) and not takes_pair(few - 0.1, tokens=256)
    # Of a kernel that is over before the host has launched the next one it must save a launch.
    short = BUSY[PASS.get(op, "backward")] - 1
    few = CUBLAS_MUST_SAVE if op in ALONE else 0.0 if op in PAIR_IS_FREE else PAIR_MUST_SAVE
    assert not takes_pair(few - 0.1, tokens=256, fused=short) and takes_pair(few + 0.1, tokens=256, fused=short)
    # In float32, where the heuristic takes cuBLAS everywhere, every op may.
    assert takes_pair(must_save + 1, torch.float32) and not takes_pair(must_save - 1, torch.float32)


def test_only_a_pair_that_may_serve_serves_alone():
    alone = choose("glu_backward", 512, BF16, [(PAIR, 9.0)])
    assert alone is not None and (alone.settings, alone.pair_us, alone.fused_us) == (PAIR, 9.0, None)
    assert choose("glu", 512, BF16, [(PAIR, 9.0)]) is None


def test_of_level_kernels_for_small_batches_the_first_is_taken():
    first, second = (replace(SMALL, family="small", block_n=n) for n in (64, 32))

    def chosen(us: float, other: float = 9.0) -> Settings:
        choice = choose("glu", 16, BF16, [(LARGE, other), (first, us), (second, 5.0)])
        assert choice is not None and choice.us == {first: us, second: 5.0, LARGE: other}[choice.settings]
        return choice.settings

    assert chosen(5.0 + LEVEL - 0.01) == first and chosen(5.0 + LEVEL + 0.01) == second
    assert chosen(5.0 + LEVEL - 0.01, other=4.9) == LARGE  # of another family, which is the fastest


def test_candidates_suit_what_they_are_for():
    for op, all_of in CANDIDATES.items():
        assert len(set(all_of)) == len(all_of) and all_of[0] == PAIR
        assert any(c.family == "gluon" for c in all_of) <= (op in GLUON_OPS)
        small = {c.family for c in all_of} & {"small"}
        assert bool(small) is (op in SMALL_OPS)
        ours = set() if op in (*PRODUCTS, *GLUON_ONLY_OPS) else {"tma"}
        for M in (1, 64, 65, 257):
            few = small if M <= SMALL_TOKENS.get(op, 0) else set()
            assert {c.family for c in candidates.candidates(op, M, True, False)} == {"pair"} | ours | few
            others = {"pointer"} if ours else set()
            assert {c.family for c in candidates.candidates(op, M, False, False)} == {"pair"} | others | few
            found = candidates.candidates(op, M, True, True)
            spilling = [c for c in all_of if op in candidates.HIDDEN_BACKWARD and c.warps == 4] if M == 64 else []
            fit = [c for c in all_of if c.family != "small" or (M <= SMALL_TOKENS[op] and c not in spilling)]
            assert len(found) == len(fit)
            assert {c.block_m for c in found if c.family == "small"} <= {16 if M == 1 else 64}
        json_rows = [{"op": op, "dtype": "bfloat16", "precision": "", "N": 1, "K": 1, "M": i + 1} for i in range(99)]
        both = [replace(c, block_m=max(c.block_m, 16)) for c in (*all_of, *candidates.POINTER_CANDIDATES)]
        rows = [{**r, "settings": asdict(c)} for r, c in zip(json_rows, both, strict=False)]
        tables.parse(json.dumps({"rows": rows}))  # a table may hold each
    assert set(CANDIDATES) - set(NOT_TABLED) == {op for ops in LAYERS.values() for op in ops}
    assert set(CANDIDATES) == set(measure.KERNEL) == set(candidates.PASS)
    assert set(measure.WORST) == set(DTYPES)


# ---------------------------------------------------------------------------------------------- the file


def test_a_run_writes_a_table_that_the_package_reads(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "nvidia-toy.json"
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    toy = mock.patch.object(settings.device, "info", return_value=DeviceInfo("nvidia-toy", (9, 0), 132))
    with toy:  # the tables are read here
        assert calculate_settings("glu", 100, 3072, 768, BF16, "cuda") != SMALL
    report = run(fake, None, dtypes=("bfloat16", "tf32"), ops=None, layers=("geglu",))
    assert report.out == out and report.read and "export" not in str(report)
    content = json.loads(out.read_text())
    assert (content["gpu"], content["torch"], content["triton"]) == ("NVIDIA Toy", "2.9", "3.6")
    assert content["date"] and content["method"] and "rows" in content
    found = {tuple(row[k] for k in ("op", "dtype", "precision", "M", "N", "K")): row for row in content["rows"]}
    assert len(found) == 4 * 2 * 2 == len(fake.asked)
    one = found["dual_dgrad", "float32", "tf32", 128, 768, 3072]
    cost = 1.0 + 128 * 768 / 1e3
    assert (one["us"], one["pair_us"], one["timed"], one["left_out"]) == (cost, cost + 10, 3, 1)
    assert Settings(**one["settings"]) == SMALL  # by medians: by means and lowest times it were the other
    with toy:  # in the same process
        assert calculate_settings("glu", 100, 3072, 768, BF16, "cuda") == SMALL


def test_a_rerun_measures_what_is_new(fake: Fake, tmp_path: Path):
    out = tmp_path / "t.json"
    assert len(run(fake, out).measured) == 2
    before = rows_of(out)
    report = run(fake, out, tokens=(16, 64, 128))
    assert [job.M for job in report.there] == [16, 128] and [job.M for job in report.measured] == [64]
    assert len(fake.asked) == 3
    assert [row for row in rows_of(out) if row["M"] != 64] == before
    assert "export FUSEDMLP_SETTINGS=" in str(report)


@pytest.mark.parametrize("machine", [Machine("NVIDIA Toy", "2.10", "3.6"), Machine("NVIDIA Toy", "2.9", "3.7")])
def test_what_other_versions_measured_is_measured_again(fake: Fake, tmp_path: Path, machine: Machine):
    out = tmp_path / "t.json"
    run(fake, out)
    report = run(fake, out, tokens=(128,), machine=machine)
    assert [job.M for job in report.measured] == [128] and not report.there
    content = json.loads(out.read_text())
    assert (content["torch"], content["triton"]) == (machine.torch, machine.triton)
    old, new = sorted(content["rows"], key=lambda row: row["M"])
    # The row that stays says whose it is: neither a run of these versions nor one of those mistakes it.
    assert (old["torch"], old["triton"]) == ("2.9", "3.6") and "torch" not in new
    assert [job.M for job in run(fake, out, machine=machine).measured] == [16]
    assert [job.M for job in run(fake, out).measured] == [16, 128]


def test_another_gpus_file_is_refused(fake: Fake, tmp_path: Path):
    out = tmp_path / "t.json"
    run(fake, out)
    other = Machine("NVIDIA Other", "2.9", "3.6")
    with pytest.raises(TuneError, match=r"settings of NVIDIA Toy, and this GPU is NVIDIA Other; give another --out"):
        run(fake, out, machine=other)
    run(fake, out, machine=other, resume=False)
    assert json.loads(out.read_text())["gpu"] == "NVIDIA Other"
    assert json.loads((tmp_path / "t.json.bak").read_text())["gpu"] == "NVIDIA Toy"


def test_restart_measures_all_and_keeps_the_old_file(fake: Fake, tmp_path: Path):
    out = tmp_path / "t.json"
    run(fake, out)
    old = out.read_text()
    assert len(run(fake, out, tokens=(128,), resume=False).measured) == 1
    assert [row["M"] for row in rows_of(out)] == [128]
    assert (tmp_path / "t.json.bak").read_text() == old


def test_a_broken_file_is_refused_and_kept(fake: Fake, tmp_path: Path):
    out = tmp_path / "t.json"
    out.write_text("{")
    with pytest.raises(TuneError, match=r"no settings table \(JSONDecodeError.*--restart"):
        run(fake, out)
    assert out.read_text() == "{" and not fake.asked


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
from pathlib import Path
from support.tuning import Fake, run
class Killer(Fake):
    def __call__(self, *args):
        if len(self.asked) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*args)
run(Killer(), Path(sys.argv[1]), tokens=(1, 2, 3, 4))
"""


def test_a_killed_run_leaves_what_it_measured(fake: Fake, tmp_path: Path):
    out = tmp_path / "t.json"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", KILLED, str(out)], cwd=root, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [row["M"] for row in rows_of(out)] == [1, 2]
    assert [job.M for job in run(fake, out, tokens=(1, 2, 3, 4)).measured] == [3, 4]


@pytest.mark.parametrize("fault", ["os.fsync", "os.replace"])
def test_a_failing_write_leaves_the_file_before_it(fake: Fake, tmp_path: Path, fault: str):
    out = tmp_path / "t.json"
    run(fake, out, tokens=(16,))
    before = out.read_text()
    with mock.patch(fault, side_effect=OSError(28, "No space left on device")):
        with pytest.raises(TuneError, match=r"cannot write .*t.json: No space left on device; rows measured before"):
            run(fake, out)
    assert out.read_text() == before
    assert list(tmp_path.iterdir()) == [out]


def test_the_file_is_never_seen_half_written(tmp_path: Path):
    """Another process sees the whole old or the whole new file: the name changes hands in one step."""
    out = tmp_path / "t.json"
    files.write_table(out, {}, [])
    inode = out.stat().st_ino
    with open(out) as reader:
        files.write_table(out, {"gpu": "x"}, [{"a": 1}] * 1000)
        assert reader.read() == '{"rows": [\n\n]}\n'
    assert out.stat().st_ino != inode


# ---------------------------------------------------------------------------------------------- the way there


def test_the_budget_stops_and_says_what_is_left(fake: Fake, tmp_path: Path):
    ticks = iter(range(0, 10_000, 60))
    report = run(fake, tmp_path / "t.json", tokens=(1, 2, 3, 4, 5), budget=150, clock=lambda: float(next(ticks)))
    assert [job.M for job in report.measured] == [1, 2] and [job.M for job in report.left] == [3, 4, 5]
    assert "budget is spent with 3 left; the same command goes on with glu bfloat16 [3, 768 -> 3072]" in str(report)
    assert [row["M"] for row in rows_of(report.out)] == [1, 2]
    assert not run(fake, report.out, tokens=(1, 2, 3, 4, 5)).left
    assert len(fake.asked) == 5


def test_few_tokens_come_first_and_shapes_once(fake: Fake, tmp_path: Path):
    layers = ("geglu", "swiglu", "geglu")
    run(fake, tmp_path / "t.json", tokens=(128, 1, 16, 1), ops=("dual_dgrad", "glu"), layers=layers)
    assert [ask[:2] for ask in fake.asked] == [(op, M) for op in ("glu", "dual_dgrad") for M in (1, 16, 128)]


def test_relu_by_cublas_is_measured_where_it_serves(fake: Fake, tmp_path: Path):
    def asked(ops: Any, hopper: bool, dtypes: Any = ("bfloat16",)) -> list[Any]:
        fake.asked.clear()
        machine = replace(TOY, hopper=hopper)
        options = {"tokens": (16,), "layers": ("mlp",), "dtypes": dtypes, "resume": False}
        run(fake, tmp_path / "t.json", machine=machine, ops=ops, **options)
        return [(op, dtype) for op, *_, dtype in fake.asked]

    both = ("linear_act", "linear_relu")
    assert asked(both, True) == [("linear_act", "bfloat16"), ("linear_relu", "bfloat16")]
    assert asked(both, False) == [("linear_act", "bfloat16")]
    assert asked(both, True, ("float32", "tf32")) == [("linear_act", "float32"), ("linear_act", "tf32")]
    with pytest.raises(TuneError, match="on Hopper GPUs, in bfloat16 and float16; name linear_act"):
        asked(("linear_relu",), False)


def test_a_shape_that_fails_is_reported_and_the_others_go_on(tmp_path: Path, fake: Fake):
    def failing(op: str, M: int, *rest: Any) -> measure.Measured:
        if M == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure.Measured(left_out=[(SMALL, "wrong")]) if M == 3 else fake(op, M, *rest)

    report = run(failing, tmp_path / "t.json", tokens=(1, 2, 3, 4))
    assert [row["M"] for row in rows_of(report.out)] == [1, 4]
    assert [job.M for job, _ in report.failed] == [2, 3]
    assert "2 without a row" in str(report) and "OutOfMemoryError: CUDA out of memory" in str(report)
    assert "no fused candidate of 1 was right and fit" in str(report)


def test_a_lost_device_ends_the_run(tmp_path: Path, fake: Fake):
    def losing(op: str, M: int, *rest: Any) -> measure.Measured:
        if M == 2:
            raise files.DeviceLost("the GPU does not answer after glu")
        return fake(op, M, *rest)

    with pytest.raises(TuneError, match="does not answer after glu; the 1 rows measured before it are kept"):
        run(losing, tmp_path / "t.json", tokens=(1, 2, 3))
    assert [row["M"] for row in rows_of(tmp_path / "t.json")] == [1]


@pytest.mark.parametrize("shown", [progress.Lines, progress.default])
def test_progress_goes_to_stderr(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Any):
    run(fake, tmp_path / "t.json", progress=shown())
    out, err = capsys.readouterr()
    assert out == ""
    assert "glu bfloat16 [128, 768 -> 3072]: 99.3 us, tma 64x64x64" in err
    assert "left out: glu bfloat16 [16, 768 -> 3072] gluon" in err and "OutOfResources" in err
    assert "2/2" in err


def test_without_tqdm_there_are_lines():
    with mock.patch.dict(sys.modules, {"tqdm": None}):
        assert isinstance(progress.default(), progress.Lines)


def test_two_runs_may_share_a_file(tmp_path: Path):
    """Two GPUs of one model have one default file: neither run takes the other's rows out of it."""
    path = tmp_path / "shared.json"
    runs = [files.TableFile.open(path, Machine("NVIDIA Toy", "2.9", "3.6"), "how") for _ in range(2)]
    row = {"op": "glu", "dtype": "bfloat16", "precision": "", "N": 64, "K": 64, "settings": asdict(SMALL)}
    for n in range(3):
        for i, one in enumerate(runs):
            one.add({**row, "M": 1 + 10 * i + n})
    assert sorted(r["M"] for r in json.loads(path.read_text())["rows"]) == [1, 2, 3, 11, 12, 13]
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []
    assert path.stat().st_mode & 0o444 == 0o444
