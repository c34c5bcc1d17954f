"""bench/sanitize.py without a GPU: every case launches the kernels that it is for, faults are found, tools are run.

The results of the kernels themselves: tests/interpreter/test_sanitize_interpreter.py.
"""

from __future__ import annotations

import ast
import stat
import sys
from pathlib import Path

import pytest
import torch
from support.aot import DEVICES, pretended
from support.gluon import needs_gluon

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common, sanitize  # noqa: E402
from fusedmlp import functional, settings  # noqa: E402

CASES = [pytest.param(c, id=str(c), marks=[needs_gluon] if c.family == "gluon" else []) for c in sanitize.CASES]


@pytest.mark.parametrize("case", CASES)
def test_a_case_launches_its_kernels_on_hopper(case: sanitize.Case) -> None:
    meta = {name: t.to("meta") for name, t in sanitize.operands(case).items()}
    with settings.override(family=case.family, **case.tile), pretended(DEVICES["nvidia-h200"]) as recorded:
        outputs = case.widths[{"relu_mlp": -1, "linear_act": 1}.get(case.op, 0)]
        gy = torch.empty(case.tokens, outputs, dtype=torch.bfloat16, device="meta")
        found = sanitize.compute(case, functional, meta, gy)
    assert set(case.kernels) <= {entry.name for entry in recorded}
    assert len(found) == (1 + len(meta) if case.backward else 1)
    for entry in recorded:
        tile = {k.lower(): v for k, v in entry.named_constants.items()}
        assert all(tile.get(k, v) == v for k, v in case.tile.items() if k != "parts")


def test_every_kernel_has_a_case() -> None:
    """The kernels that are launched by name: those of kernels/ that no other kernel calls."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "fusedmlp" / "kernels").rglob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = {f.name for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)}
    launched = ast.parse("\n".join(p.read_text() for p in (ROOT / "fusedmlp" / "launchers").glob("*.py")))
    passed = {
        ast.unparse(node.args[0])
        for node in ast.walk(launched)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Launch"
    }
    aliases = {"act_grad_kernel": "act_grad"}
    named = {aliases.get(name, name) for name in passed}
    assert len(named) > 15 and named <= kernels
    assert named == {kernel for case in sanitize.CASES for kernel in case.kernels}


def test_cases_have_names_of_their_own() -> None:
    assert len({str(case) for case in sanitize.CASES}) == len(sanitize.CASES)


def test_what_is_not_launched_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the layers compute by PyTorch's own operations: right, and none of our kernels."""
    assert sanitize.run(sanitize.CASES[:2], "cpu") == 2
    said = capsys.readouterr().out
    assert "glu_mlp tma: dual_dgrad_tma, glu_backward_tma, glu_tma not launched, but nothing" in said
    assert "0 of 2 cases are right" in said


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sanitize.Case("glu_mlp", (), "tma")
    assert sanitize.check(case, "cpu") is None
    real = functional.glu_mlp

    def off(x: torch.Tensor, *rest: object) -> torch.Tensor:
        y = real(x, *rest)
        return torch.where(torch.arange(y.shape[1]) == 7, y * 1.2, y)  # one column of 72

    monkeypatch.setattr(functional, "glu_mlp", off)
    assert "output" in (sanitize.check(case, "cpu") or "")
    monkeypatch.setattr(functional, "glu_mlp", lambda *a: (_ for _ in ()).throw(RuntimeError("illegal memory access")))
    assert sanitize.run([case], "cpu") == 1


def tool(folder: Path, body: str) -> str:
    """A stand-in for compute-sanitizer; its arguments are those of the tool, then the command."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    "body, clean",
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", True),
        ("echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'", True),
        ("echo '========= ERROR SUMMARY: 2 errors'", False),
        ("echo '========= RACECHECK SUMMARY: 1 hazard displayed'", False),
        ("echo '========= ERROR SUMMARY: 0 errors'; exit 1", False),
        ("echo nothing", False),
    ],
)
def test_what_a_tool_says_is_kept_and_counts(tmp_path: Path, body: str, clean: bool) -> None:
    program = tool(tmp_path, f'echo "$@"; {body}')
    assert sanitize.under("racecheck", program, ["--only", "tma"], tmp_path / "h200") is clean
    log = (tmp_path / "h200" / "sanitize-racecheck.log").read_text()
    assert "--tool racecheck" in log and "sanitize.py --only tma" in log
    assert log.splitlines()[-1] in ("nothing", body.split("'")[1] if "'" in body else "")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(common, "need_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    ran: list[int] = []
    monkeypatch.setattr(sanitize, "run", lambda cases: ran.append(len(cases)) or 0)
    assert sanitize.main([]) == 0 and ran == [len(sanitize.CASES)]
    assert sanitize.main(["--only", "relu_mlp"]) == 0 and ran[-1] == 2
    with pytest.raises(SystemExit):
        sanitize.main(["--only", "conv"])
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main(["--tools", "memcheck"]) == 2
    assert "compute-sanitizer is neither" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "sanitizer", lambda: tool(tmp_path, "echo 'ERROR SUMMARY: 0 errors'"))
    assert sanitize.main(["--tools", "memcheck", "synccheck"]) == 0
    assert {path.name for path in (tmp_path / "h200").iterdir()} == {"sanitize-memcheck.log", "sanitize-synccheck.log"}
    monkeypatch.setattr(sanitize, "run", lambda cases: 1)
    assert sanitize.main(["--tools", "memcheck"]) == 1 and sanitize.main([]) == 1
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2


def test_the_sanitizer_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tool(tmp_path, "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.sanitizer() == program
