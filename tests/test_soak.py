"""bench/soak.py on the CPU: it counts its steps, and sees what differs, what grows and what raises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import soak  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "WIDTHS", ((16, 24), (8, 16)))
    monkeypatch.setattr(soak, "COMPARE_EVERY", 3)
    monkeypatch.setattr(soak, "MOST_HOST_GROWTH", 1 << 40)  # the test process allocates what it likes


def run(**options: Any) -> list[str]:
    return soak.soak([CPU], 41, threads=3, most_tokens=9, **options)


def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == []
    out = capsys.readouterr().out
    assert "41 steps by 3 threads, 13 compared with eager" in out  # 6 of 20, 7 of 21
    assert "9 sizes warmed up" in out and "after step 20" in out


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = soak.step

    def wrong(module: torch.nn.Module, *args: Any) -> list[torch.Tensor]:
        found = original(module, *args)
        return [t * 1.1 for t in found] if isinstance(module, soak.FusedGLUMLP) else found

    monkeypatch.setattr(soak, "step", wrong)
    assert any("tensor 0 differs from eager's by" in fault for fault in run())


def test_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = soak.step

    def wrong(module: torch.nn.Module, *args: Any) -> list[torch.Tensor]:
        found = original(module, *args)
        return [t * torch.nan for t in found] if isinstance(module, soak.FusedGLUMLP) else found

    monkeypatch.setattr(soak, "step", wrong)
    assert run()


def test_what_a_thread_raises_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("a kernel went astray")

    monkeypatch.setattr(soak, "step", broken)
    assert "RuntimeError: a kernel went astray" in run()


@pytest.mark.parametrize("host, device", [(100 << 20, 0), (0, 1 << 20)])
def test_growth_is_seen(monkeypatch: pytest.MonkeyPatch, host: int, device: int) -> None:
    monkeypatch.setattr(soak, "MOST_HOST_GROWTH", 24 << 20)
    marks = [soak.Memory(0, [0]), soak.Memory(host, [device])]
    monkeypatch.setattr(soak.Memory, "now", lambda devices: marks.pop(0))
    faults = run()
    assert len(faults) == 1 and "memory grew by" in faults[0]


def test_memory_is_this_process() -> None:
    held = soak.Memory.now([CPU])
    kept = bytearray(b"x") * (64 << 20)
    more = soak.Memory.now([CPU])
    assert more.host - held.host > 48 << 20 and len(kept) == 64 << 20
    assert held.devices == [0]


def test_without_a_gpu_it_fails_clearly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert soak.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        soak.main(["--steps", "1"])
