"""docs/profiling.md: its tables are made from the shipped traces, its commands parse, its code runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from bench import profiling_tables
from fusedmlp import FusedGeGLUMLP, cli
from fusedmlp.profiling.workloads import mlp as eager_mlp

ROOT = Path(__file__).resolve().parents[1]
TEXT = profiling_tables.DOCS.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)


def test_tables_are_those_of_the_traces() -> None:
    assert profiling_tables.filled(TEXT) == TEXT, "run python bench/profiling_tables.py"


def test_a_document_without_the_places_is_refused() -> None:
    with pytest.raises(SystemExit, match="no place for the table linear"):
        profiling_tables.filled("nothing")


def test_pictures_and_files_exist() -> None:
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", TEXT):
        assert (ROOT / "docs" / target).stat().st_size > 10_000
    for name in re.findall(r"`((?:tests|bench)/[\w./-]+)`", TEXT):
        assert (ROOT / name).exists(), name


def test_commands_parse() -> None:
    lines = TEXT.replace("\\\n", " ")
    commands = re.findall(r"python -m fusedmlp ((?:profile|explain) [^`\n]*--?\w[^`\n]*|explain [^`\n]+)", lines)
    assert len(commands) >= 3
    for command in commands:
        cli._parser().parse_args(shlex.split(command))


@pytest.mark.filterwarnings("ignore::fusedmlp.profiling.HostCountWarning")
def test_the_code_for_tests_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = next(text for language, text in BLOCKS if language == "python" and "count_launches() as c" in text)
    eager = eager_mlp("geglu", 16, 32)
    fused = FusedGeGLUMLP.from_module(eager)
    names = {"mlp": fused, "eager": eager, "fused": fused, "x": torch.randn(4, 16, requires_grad=True)}
    with pytest.raises(AssertionError, match="at most 2 launches were expected; found 5 compute operations"):
        exec(code, names)  # without a GPU the fused layer runs PyTorch's five operations
    exec(code.replace("at_most=2", "at_most=5"), names)
    assert "launches: forward 5 -> 5, step 15 -> 15" in capsys.readouterr().out
