"""The user's settings table: where it is read, what it wins over, broken ones, and what explain_plan says of it."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.aot import DEVICES, pretended
from support.gluon import needs_gluon

import fusedmlp
from fusedmlp import calculate_settings, cli, explain_plan, plan, settings
from fusedmlp.settings import tables
from fusedmlp.settings.device import DeviceInfo

GPU = DeviceInfo("nvidia-toy", (9, 0), 132)
WIDTHS = {"N": 3072, "K": 768}
BF16 = {"op": "glu", "dtype": "bfloat16", "precision": "", **WIDTHS}


def row(M: int, block_m: int = 16, family: str = "tma", **more: object) -> dict[str, object]:
    return {**BF16, "M": M, "settings": {"family": family, "block_m": block_m}, **more}


def write(path: Path, *rows: object, gpu: str = "NVIDIA Toy") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "torch": "2.9", "triton": "3.6", "rows": rows}))
    return path


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tables but what a test writes: under tmp_path / "cache", or where it points the variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tables.VARIABLE)
    tables.forget()
    yield
    tables.forget()
    plan.clear()


def block_m(M: int = 64, N: int = 3072, dtype: torch.dtype = torch.bfloat16) -> int:
    with mock.patch.object(settings.device, "info", return_value=GPU):
        return calculate_settings("glu", M, N, 768, dtype, "cuda").block_m


@pytest.fixture
def heuristic() -> int:
    found = block_m()
    assert found != 16
    tables.forget()
    return found


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heuristic: int):
    write(tmp_path / "cache/fusedmlp/nvidia-toy.json", row(64))
    assert block_m() == 16
    assert block_m(N=3088) == block_m(dtype=torch.float16) == heuristic
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / ".cache/fusedmlp/nvidia-toy.json", row(64, 32))
    tables.forget()
    assert block_m() == 32
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # not absolute: to be ignored (XDG Base Directory Specification)
    tables.forget()
    assert block_m() == 32


def test_the_variable_names_a_file_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heuristic: int):
    write(tmp_path / "cache/fusedmlp/nvidia-toy.json", row(64))
    for value, expected in [
        (write(tmp_path / "any.json", row(64, 32)), 32),
        (write(tmp_path / "folder/nvidia-toy.json", row(64, 128)).parent, 128),
        (tmp_path, heuristic),  # a folder for several GPUs, with nothing for this one
        ("", heuristic),  # none at all
    ]:
        monkeypatch.setenv(tables.VARIABLE, str(value))
        tables.forget()
        assert block_m() == expected, value


def test_read_once(tmp_path: Path, heuristic: int):
    path = write(tmp_path / "cache/fusedmlp/nvidia-toy.json", row(64))
    assert block_m() == 16
    path.write_text("broken since")
    assert block_m() == 16


def test_own_rows_win_for_the_widths_that_they_have(tmp_path: Path):
    other = {**row(64, 128), "N": 4096}
    shipped = tables.parse(json.dumps({"rows": [row(16, 64), row(1024, 128), row(8192, 256), other]}))
    own = tables.parse(json.dumps({"rows": [row(8, 16), row(128, 32)]}), own=True)
    merged = tables.overlay(shipped, own)
    key = ("glu", "bfloat16", "", 3072, 768)
    # The shipped row of 16 tokens is gone; above the most tokens that are the user's the shipped ones stay.
    assert [(r.M, r.settings.block_m, r.own) for r in merged[key]] == [
        *((8, 16, True), (128, 32, True)),
        *((1024, 128, False), (8192, 256, False)),
    ]
    assert [r.settings.block_m for r in merged["glu", "bfloat16", "", 4096, 768]] == [128]
    assert [r.M for r in shipped[key]] == [16, 1024, 8192]


@pytest.mark.parametrize("most, beyond", [(128, None), (2048, 16), (8192, 16)])
def test_a_few_tokens_say_nothing_of_many(tmp_path: Path, heuristic: int, most: int, beyond: int | None):
    """A run for decoding alone, or one that its budget stopped: the heuristic serves larger batches."""
    expected = block_m(50_000) if beyond is None else beyond
    tables.forget()
    write(tmp_path / "cache/fusedmlp/nvidia-toy.json", row(most))
    assert block_m(most) == 16
    assert block_m(50_000) == expected


BROKEN = {
    "no JSON": ("{", "JSONDecodeError"),
    "no object": ("[]", 'a list "rows"'),
    "no rows": ('{"rows": {}}', 'a list "rows"'),
    "no row": ('{"rows": [3]}', "no object"),
    "a key is missing": (json.dumps({"rows": [BF16]}), "no M, settings"),
    "no tile": (json.dumps({"rows": [row(64, 24)]}), "block_m must be a power of two, not 24"),
    "text": (json.dumps({"rows": [row(64, "64")]}), "not '64'"),  # type: ignore[arg-type]
    "no stages": (json.dumps({"rows": [{**BF16, "M": 1, "settings": {"family": "tma", "stages": 0}}]}), "stages"),
    "settings are a list": (json.dumps({"rows": [{**BF16, "M": 1, "settings": []}]}), "settings table"),
    "no dtype": (json.dumps({"rows": [{**row(64), "dtype": "int8"}]}), "unknown dtype"),
    "a precision that it has not": (json.dumps({"rows": [{**row(64), "precision": "tf32"}]}), "precision"),
    "no tokens": (json.dumps({"rows": [row(0)]}), "whole numbers"),
    "tokens are text": (json.dumps({"rows": [{**row(1), "M": "1"}]}), "whole numbers"),
    "no time": (json.dumps({"rows": [row(64, us=float("nan"))]}), "microseconds"),
    "an unknown family": (json.dumps({"rows": [row(64, family="cuda")]}), "unknown op or family"),
    "deep": ("[" * 100_000, "RecursionError"),
    "another GPU's": (json.dumps({"gpu": "NVIDIA A100", "rows": [row(64)]}), "measured on NVIDIA A100"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_a_warning_once(tmp_path: Path, heuristic: int, name: str):
    text, reason = BROKEN[name]
    path = tmp_path / "cache/fusedmlp/nvidia-toy.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="ignores the settings table") as found:
        assert block_m() == block_m() == heuristic
    (message,) = [str(warning.message) for warning in found]
    assert str(path) in message and reason in message


def test_what_cannot_be_read_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heuristic: int):
    path = tmp_path / "cache/fusedmlp/nvidia-toy.json"
    path.mkdir(parents=True)  # a folder where the file should be
    with pytest.warns(UserWarning, match="nvidia-toy.json: IsADirectoryError"):
        assert block_m() == heuristic
    path.rmdir()
    path.write_bytes(b"\xff\xfe\x00")
    tables.forget()
    with pytest.warns(UserWarning, match="UnicodeDecodeError"):
        assert block_m() == heuristic
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "misspelt.json"))
    tables.forget()
    with pytest.warns(UserWarning, match=r"misspelt.json.*no such file or folder, and FUSEDMLP_SETTINGS"):
        assert block_m() == heuristic
    monkeypatch.delenv(tables.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    tables.forget()
    with (
        mock.patch.object(Path, "home", side_effect=RuntimeError("no home")),
        pytest.warns(UserWarning, match="no home"),
    ):
        assert block_m() == heuristic


def test_the_interpreter_reads_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(tables.VARIABLE, str(write(tmp_path / "any.json", row(64))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calculate_settings("glu", 64, 3072, 768, torch.bfloat16, "cpu").block_m != 16


# ---------------------------------------------------------------------------------------------- what is said of it


def note(M: int = 1024, grouped: bool = True, **forced: object) -> fusedmlp.PlanNote:
    """``grouped``: whether the products after the hidden layer may share a launch."""
    x = torch.empty(M, 768, device="meta", dtype=torch.bfloat16, requires_grad=True)
    gate, up = (torch.empty(3072, 768, device="meta", dtype=torch.bfloat16) for _ in range(2))
    down = torch.empty(768, 3072, device="meta", dtype=torch.bfloat16)
    plan.clear()
    tables.forget()
    apart = contextlib.nullcontext() if grouped else settings.override("glu_grads", family="pair")
    with settings.override(**forced), apart, pretended(DEVICES["nvidia-h100"]):
        return explain_plan(fusedmlp.glu_mlp, x, gate, up, down, activation="gelu").notes[0]


def rows_for_h100(path: Path, *rows: dict[str, object]) -> None:
    write(path / "cache/fusedmlp/nvidia-h100.json", *rows, gpu="NVIDIA H100")


def test_explain_shows_the_measured_ratio(tmp_path: Path):
    dgrad = {**BF16, "op": "dual_dgrad", "N": 768, "K": 3072, "M": 2048, "settings": {"family": "pair"}}
    backward = {**row(1024, 64), "op": "glu_backward"}
    rows_for_h100(
        tmp_path,
        row(1024, 64, us=100.0, pair_us=93.04),
        {**dgrad, "us": 50.0, "pair_us": 50.0, "fused_us": 80.0},
        {**backward, "us": 100.0},
    )
    found = note(M=512, grouped=False)
    assert found.measured == (
        "forward: cuBLAS and a pointwise kernel: 0.93 of the fused kernel's time (measured at 1024 tokens)",
        "dgrad: two cuBLAS products: 0.62 of the fused kernel's time (measured at 2048 tokens)",
    )
    tile = {"block_m": 16, "block_n": 64, "block_k": 64}
    small = {"op": "down", "N": 768, "K": 3072, "M": 16, "settings": {"family": "small", **tile}}
    rows_for_h100(tmp_path, {**BF16, **small, "us": 4.0, "pair_us": 5.0})
    assert note(M=16).measured == ("down: cuBLAS: 1.25 of the fused kernel's time (measured)",)
    assert str(found).endswith("\n  ".join(["", *found.measured]))


@needs_gluon
def test_explain_says_nothing_of_products_that_one_launch_makes(tmp_path: Path):
    dgrad = {**BF16, "op": "dual_dgrad", "N": 768, "K": 3072, "M": 2048, "settings": {"family": "pair"}}
    rows_for_h100(tmp_path, {**dgrad, "us": 50.0, "pair_us": 50.0, "fused_us": 80.0})
    assert note(M=512, grouped=False).measured and not note(M=512).measured


def test_explain_says_nothing_where_nothing_was_measured(tmp_path: Path):
    assert note().measured == ()
    rows_for_h100(tmp_path, row(1024, 64), {**row(1024, 64), "op": "glu_backward", "pair_us": 3.0})
    found = note()
    assert "64x64x32" in found.forward[0]  # the row's
    assert found.measured == ()
    assert "measured" not in str(found)


def test_explain_says_nothing_of_a_row_that_is_not_used(tmp_path: Path):
    rows_for_h100(tmp_path, row(1024, 64, us=100.0, pair_us=93.0))
    assert note().measured
    assert note(stages=2).measured == ()
    assert note(M=4096).measured == ()  # beyond a row of so few tokens


def test_info_names_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert tables.describe("nvidia-toy") == [f"yours, none: {tmp_path / 'cache/fusedmlp/nvidia-toy.json'}"]
    path = write(tmp_path / "cache/fusedmlp/nvidia-toy.json", row(64), row(128))
    tables.forget()
    assert tables.describe("nvidia-toy") == [f"yours, 2 rows, torch 2.9, triton 3.6: {path}"]
    shipped = tables.describe("nvidia-h200")
    assert shipped[0].startswith("shipped, ") and shipped[0].endswith("rows: nvidia-h200.json")
    path.write_text("{")
    tables.forget()
    with pytest.warns(UserWarning, match="ignores"):
        assert tables.describe("nvidia-toy") == [f"yours, not in use: {path}"]
    assert tables.describe("interpreter") == ["none: the heuristic decides"]
    if not torch.cuda.is_available():
        assert cli.main(["info"]) == 0
        assert str(tmp_path / "cache/fusedmlp/<gpu>.json") in capsys.readouterr().out
        monkeypatch.setenv(tables.VARIABLE, "")
        assert cli.main(["info"]) == 0
        assert "FUSEDMLP_SETTINGS is set empty" in capsys.readouterr().out
