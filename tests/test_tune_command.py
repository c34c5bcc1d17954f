"""What users of the tuner get wrong, where its table goes, and its command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.tuning import Fake, run

from fusedmlp import cli
from fusedmlp.settings import tables
from fusedmlp.tune import TuneError, command


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    tables.forget()


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"ops": ["gemm"]}, r"unknown op 'gemm'; allowed are: glu, down, glu_backward"),
        ({"layers": ["moe", "geglu"]}, r"unknown layer 'moe'; allowed are: geglu, swiglu, mlp, linear"),
        ({"dtypes": ["int8"]}, r"unknown dtype 'int8'; allowed are: bfloat16, float16, float32, tf32"),
        ({"dtypes": []}, r"no dtype given; allowed are"),
        ({"ops": ["act_backward"], "layers": ["geglu"]}, r"act_backward: no kernel of geglu, which have: glu, "),
        ({"shapes": []}, r"widths are pairs.*768,3072"),
        ({"shapes": [(768, 0)]}, r"widths are pairs.*got \[\(768, 0\)\]"),
        ({"tokens": [0]}, r"tokens are 1 to 8 whole numbers of 1 or more; got \[0\]"),
        ({"tokens": range(1, 10)}, r"tokens are 1 to 8 whole numbers"),
        ({"budget": 0.0}, r"budget must be above 0, got 0 minutes"),
    ],
)
def test_wrong_requests_say_what_is_allowed(fake: Fake, tmp_path: Path, changed: dict[str, Any], message: str):
    with pytest.raises(TuneError, match=message):
        run(fake, tmp_path / "t.json", **changed)
    assert not fake.asked and not list(tmp_path.iterdir())


def test_token_counts_stay_few_over_all_runs(fake: Fake, tmp_path: Path):
    run(fake, tmp_path / "t.json", tokens=range(1, 7))
    with pytest.raises(TuneError, match=r"9 token counts for glu bfloat16 N=3072 K=768.*at most 8"):
        run(fake, tmp_path / "t.json", tokens=range(7, 10))
    run(fake, tmp_path / "t.json", tokens=range(7, 9))


def test_a_file_that_cannot_be_written_is_found_before_measuring(fake: Fake, tmp_path: Path):
    with pytest.raises(TuneError, match=r"there is no folder .*none; make it"):
        run(fake, tmp_path / "none" / "t.json")
    with pytest.raises(TuneError, match=r"is a folder; name a file in it"):
        run(fake, tmp_path)
    with mock.patch.object(Path, "touch", side_effect=PermissionError(13, "Permission denied")):
        with pytest.raises(TuneError, match=r"cannot be written: Permission denied; name a file in a folder of yours"):
            run(fake, tmp_path / "t.json")
    assert not fake.asked


def test_the_default_file_is_where_the_package_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake):
    with pytest.raises(TuneError, match="FUSEDMLP_SETTINGS is set empty.*--out"):  # as conftest.py sets it
        run(fake, None)
    monkeypatch.delenv(tables.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    report = run(fake, None)
    assert report.out == tmp_path / "new/fusedmlp/nvidia-toy.json" and report.read
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TuneError, match=r"no folder for the table.*give --out FILE"):
        run(fake, None)


COMMAND = ["tune", "--widths", "768,3072"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_no_gpu_is_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert cli.main(COMMAND) == 2
    out, err = capsys.readouterr()
    assert out == "" and "tuning measures on a GPU, and torch" in err


@pytest.mark.parametrize(
    "more, message",
    [
        (["--widths", "768x3072"], "--widths takes pairs D,H of whole numbers"),
        (["--widths", "768,3072,1"], "got '768,3072,1'"),
        (["--tokens", "many"], "--tokens takes whole numbers"),
        (["--minutes", "-1"], "--minutes takes a number above 0, e.g. --minutes 30; got '-1'"),
        (["--minutes", "nan"], "--minutes takes a number above 0"),
        (["--layers", "moe"], "unknown layer 'moe'; allowed are: geglu"),
        (["--ops", "gemm"], "unknown op 'gemm'"),
        (["--dtypes", "fp8"], "unknown dtype 'fp8'"),
        (["--tokens", "0"], "tokens are 1 to 8"),
    ],
)
def test_wrong_arguments_are_exit_code_2(more: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([*COMMAND, *more]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fusedmlp tune: ") and message in err and err.count("\n") == 1


def test_widths_are_asked_for(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main(["tune"])
    assert stop.value.code == 2 and "--widths" in capsys.readouterr().err


def test_the_command_passes_everything_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = "--widths 768,3072 1024,4096 --tokens 1 16 --dtypes float16 tf32 --layers mlp --ops linear_act --minutes 1.5"
    with mock.patch.object(command, "tune") as called:
        called.return_value.failed = []
        assert cli.main(["tune", *line.split(), "--restart", "--out", "x.json"]) == 0
        called.assert_called_once_with(
            *([(768, 3072), (1024, 4096)], [1, 16], ["float16", "tf32"], ["mlp"], ["linear_act"], "x.json"),
            resume=False,
            budget=90.0,
        )
        called.return_value.failed = [("job", "reason")]
        assert cli.main(COMMAND) == 1
        assert called.call_args.kwargs == {"resume": True, "budget": None}
        called.side_effect = KeyboardInterrupt
        assert cli.main(COMMAND) == 130
    assert "stopped; what was measured is kept" in capsys.readouterr().err
