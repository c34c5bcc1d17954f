"""bench/soak.py on the CPU: it counts its steps, and sees what differs, what grows and what raises."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import soak  # noqa: E402

CPU = torch.device("cpu")
MOST_HOST_GROWTH, MOST_LATE_HOST_GROWTH = soak.MOST_HOST_GROWTH, soak.MOST_LATE_HOST_GROWTH


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "WIDTHS", ((16, 24), (8, 16)))
    monkeypatch.setattr(soak, "COMPARE_EVERY", 3)
    monkeypatch.setattr(soak, "FIRST_TOKENS", (1, 5))
    for limit in ("MOST_HOST_GROWTH", "MOST_LATE_HOST_GROWTH"):
        monkeypatch.setattr(soak, limit, 1 << 40)  # the test process allocates what it likes


def real_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MOST_HOST_GROWTH", MOST_HOST_GROWTH)
    monkeypatch.setattr(soak, "MOST_LATE_HOST_GROWTH", MOST_LATE_HOST_GROWTH)


def run(**options: Any) -> list[str]:
    return soak.soak([CPU], 41, threads=3, most_tokens=9, **options)


def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == []
    out = capsys.readouterr().out
    assert "41 steps by 3 threads, 13 compared with eager" in out  # 3 of 10, 3 of 10, 7 of 21
    assert "9 sizes warmed up" in out and out.count("after step 10, ") == out.count(" to step 20, ") == 3


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = soak.step

    def wrong(module: torch.nn.Module, *args: Any) -> list[torch.Tensor]:
        found = original(module, *args)
        return [t * 1.1 for t in found] if isinstance(module, soak.FusedGLUMLP) else found

    monkeypatch.setattr(soak, "step", wrong)
    assert any("tensor 0 is 1.0e-01 from float64's, eager's" in fault for fault in run())


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


@pytest.mark.parametrize(
    "hosts, devices, fault",
    [
        ((0, 23 << 20, 25 << 20), (0, 0, 0), "host memory grew by 25.000 MiB, allowed: 24.000"),
        ((0, 0, 5 << 20), (0, 0, 0), "host memory grew by 5.000 MiB in the second half, allowed: 4.000"),
        ((0, 0, 0), (0, 1 << 20, 1 << 20), "cpu: memory grew by 1.000 MiB"),
        ((0, 0, 0), (0, 0, 1 << 20), "cpu: memory grew by 1.000 MiB"),
        ((0, 20 << 20, 23 << 20), (8 << 20, 0, 0), None),
    ],
)
def test_growth_is_seen(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[int, ...], devices: tuple[int, ...], fault: str | None
) -> None:
    real_limits(monkeypatch)
    marks = [soak.Memory(host, [device]) for host, device in zip(hosts, devices, strict=True)]
    monkeypatch.setattr(soak.Memory, "now", lambda devices: marks.pop(0))
    faults = run()
    assert marks == [] and len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


LEAK = 2 << 10  # bytes a step
LEAKING_STEPS = 6000  # of which the second half leaks more than its limit, and all of them less than theirs


@pytest.mark.parametrize("where", ["nowhere", "host", "device"])
def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Of the memory that this process really has, and of tensors that stand for those of a device."""
    real_limits(monkeypatch)
    assert soak.MOST_LATE_HOST_GROWTH < LEAK * LEAKING_STEPS // 2 < LEAK * LEAKING_STEPS < soak.MOST_HOST_GROWTH
    assert soak.MOST_LATE_HOST_GROWTH < 5000 << 10  # a kilobyte a step of 10,000
    original, kept, tensors = soak.step, [], []

    def leaking(module: torch.nn.Module, *args: Any) -> list[torch.Tensor]:
        ours = isinstance(module, soak.FusedGLUMLP)
        if where == "host" and ours:
            kept.append(bytearray(b"x") * LEAK)
        if where == "device" and ours:
            tensors.append(torch.empty(16))
        return original(module, *args)

    monkeypatch.setattr(soak, "step", leaking)
    monkeypatch.setattr(soak, "allocated", lambda device: sum(t.nbytes for t in tensors))
    faults = soak.soak([CPU], LEAKING_STEPS, threads=2, most_tokens=9)
    expected = {
        "nowhere": [],
        "host": ["host memory grew by"],
        "device": ["cpu: memory grew by"],
    }[where]
    assert len(faults) == len(expected) and all(map(str.startswith, faults, expected))
    assert where != "host" or "in the second half" in faults[0]


def test_each_thread_begins_with_every_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = soak.step, []

    def watched(module: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor, training: bool) -> list[torch.Tensor]:
        what = isinstance(module, soak.FusedGLUMLP), x.shape[0], x.shape[1], training
        seen.append((threading.get_ident(), what))
        return original(module, x, gy, training)

    monkeypatch.setattr(soak, "step", watched)
    assert run() == []
    kinds = set(itertools.product((False, True), (9, 1, 5), (16, 8), (False, True)))
    threads = {thread for thread, _ in seen}
    assert len(threads) == 3
    for thread in threads:
        own = [what for other, what in seen if other == thread]
        assert set(own[: len(kinds)]) == kinds
    # One of them then takes every size once, so that cuBLAS has all its kernels.
    sizes = [(False, tokens, width, True) for width in (16, 8) for tokens in range(1, 10)]
    after = [[what for other, what in seen if other == thread][len(kinds) :][: len(sizes)] for thread in threads]
    assert after.count(sizes) == 1


def test_what_fails_at_the_beginning_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(worker: soak.Worker, most_tokens: int) -> None:
        raise RuntimeError("no memory for a workspace")

    monkeypatch.setattr(soak.Worker, "begin", broken)
    assert "RuntimeError: no memory for a workspace" in run()


def test_caches_are_emptied_and_held_to_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    now = soak.Memory.now
    monkeypatch.setattr(soak.Memory, "now", lambda devices: kept.append(len(soak.plan._plans)) or now(devices))
    assert run() == [] and kept == [0, 0, 0]
    monkeypatch.setattr(soak.plan, "MAX_PLANS", -1)
    monkeypatch.setattr(soak.plan, "_plans", dict.fromkeys(range(9)))
    monkeypatch.setattr(soak.steady, "_tables", {"glu_mlp": range(7)})
    monkeypatch.setattr(soak.plan, "clear", lambda: None)
    assert soak.empty_caches(5) == ["9 plans are kept, allowed: 4", "7 steady calls are kept, allowed: 4"]
    assert soak.empty_caches(8) == ["9 plans are kept, allowed: 7"]
    assert soak.empty_caches(10) == []


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
