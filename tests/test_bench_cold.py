"""bench/cold.py without a GPU: which process gets which cache, what is written, what is missed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import cold, common  # noqa: E402


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stand-ins that leave something in their cache, and take long where they find nothing."""
    seen: list[tuple[str, str]] = []

    def run(op: str, cache: str) -> dict[str, float]:
        kept = Path(cache, "kernel")
        seconds = 0.5 if kept.exists() else 8.0
        kept.touch()
        seen.append((op, cache))
        return {"forward": seconds, "step": 2 * seconds}

    monkeypatch.setattr(cold, "run", run)
    monkeypatch.setattr(common, "need_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(common, "ceilings", lambda repeats: {"copy_tb_s": 4.0})
    return seen


def test_the_first_process_is_cold_and_the_others_are_warm(
    processes: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cold.main(["--warm", "2", "--out", str(tmp_path / "cold.json")]) == 0
    assert [op for op, _ in processes] == ["geglu"] * 3 + ["relu_mlp"] * 3
    assert len({cache for _, cache in processes}) == 2 and not any(Path(cache).exists() for _, cache in processes)
    rows = {
        (r["op"], r["pass"], r["variant"]): (r["median"], r["n"]) for r in common.load(tmp_path / "cold.json")["rows"]
    }
    assert rows["geglu", "forward", "fused_cold_cache"] == (8e6, 1)
    assert rows["geglu", "step", "fused_warm_cache"] == (1e6, 2)
    assert "geglu, first forward, warm cache: 0.50 s, at most 1 s: holds" in capsys.readouterr().out


def test_a_limit_that_does_not_hold_is_an_error(
    processes: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(cold.LIMITS, "warm", 0.4)
    assert cold.main(["--out", str(tmp_path / "cold.json")]) == 1
    assert capsys.readouterr().out.count("MISSED") == 2


def test_what_a_process_says_before_it_ends_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text("import sys\nsys.exit('no kernel image')")
    monkeypatch.setattr(cold, "__file__", str(script))
    with pytest.raises(RuntimeError, match="the process of geglu ended with 1:\nno kernel image"):
        cold.run("geglu", str(tmp_path))
    script.write_text(
        "import os\nprint('first calls: {\"forward\": 1, \"step\": 2}', os.environ['TRITON_CACHE_DIR'][:0])"
    )
    assert cold.run("geglu", str(tmp_path)) == {"forward": 1, "step": 2}


def test_without_a_gpu_it_fails_clearly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cold.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
