"""bench/host.py without a GPU: the table of limits, what is measured, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import case, common, host  # noqa: E402

CEILINGS = {"copy_tb_s": 4.0, "read_tb_s": 4.4, "gemm_tflop_s": 800.0}


def rows_at(share: float, limits: Any = host.LIMITS) -> list[dict[str, Any]]:
    """Every cell, with ours at ``share`` of what each limit allows."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for limit in limits:
        if limit.against == "compile_reduce_overhead":
            continue
        ours = 80.0 if limit.shape[1] == 4096 else 10.0
        for variant, value in ((limit.variant, ours), (limit.against, ours / (limit.share * share))):
            at = (limit.op, limit.pass_, limit.shape, variant, limit.metric)
            rows[at] = common.row(*at, [value])
    at = ("relu_mlp", "forward", host.STACK, "compile_reduce_overhead", "wall_us")
    rows[at] = common.row(*at, [10.0 / share])
    return list(rows.values())


def test_every_limit_is_shown_and_held() -> None:
    text, missed = host.table(rows_at(0.99), host.LIMITS, CEILINGS)
    assert missed == 0 and "MISSED" not in text and "not measured" not in text
    assert text.count("  holds") == len(host.LIMITS) == 7 + 9
    assert "4096 -> 14336 read at 4.40 TB/s, 1.001 of the 4.4 of this run; at least 0.90: holds" in text


def test_every_limit_can_be_missed() -> None:
    text, missed = host.table(rows_at(1.01), host.LIMITS, CEILINGS | {"read_tb_s": 5.0})
    assert missed == len(host.LIMITS) + 1 == text.count("MISSED")


def test_what_was_not_measured_does_not_hold() -> None:
    rows = [r for r in rows_at(0.5) if r["variant"] != "compile"]
    text, missed = host.table(rows, host.LIMITS, CEILINGS)
    assert missed == 1 and text.count("not measured") == 1


def test_without_the_compiled_launcher_one_limit_counts() -> None:
    rows = rows_at(0.9, host.TRITON_LIMITS)
    text, missed = host.table(rows, host.TRITON_LIMITS, CEILINGS)
    assert missed == 0 and "0.65" in text


class Cpu:
    """Meters that call each variant on each set, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.same_thread: list[bool] = []
        original = case.Case

        def made(op: str, shape: tuple[int, int, int]) -> case.Case:
            tokens, hidden, intermediate = shape
            return original(op, (tokens, hidden // 32, intermediate // 32), device="cpu", sets=2)

        def meter(calls: dict[str, common.Call], sets: int, *rounds: int) -> dict[str, list[float]]:
            for call in calls.values():
                for i in range(sets):
                    call(i)
            self.same_thread.append(not torch._C._is_multithreading_enabled())
            return {v: [3.0, 2.0] for v in calls}

        monkeypatch.setattr(host, "Case", made)
        for name in ("host_us", "wall_us", "graph_us"):
            monkeypatch.setattr(common, name, meter)


def test_threading_modes_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Cpu(monkeypatch)
    rows = host.step_rows(("eager", "fused"), 4)
    assert cpu.same_thread == [False, False, True, True]
    assert torch._C._is_multithreading_enabled()
    found = {(r["variant"], r["metric"]) for r in rows}
    names = [f"{v}{mode}" for v in ("eager", "fused", "nothing") for mode in ("", "_same_thread")]
    assert found == {(v, m) for v in names for m in ("wall_us", "host_us")}
    assert {r["pass"] for r in rows} == {"step"}


def test_forward_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    Cpu(monkeypatch)
    rows = host.forward_rows(("eager", "fused"), 4) + host.decode_rows(host.DECODE[0], ("eager", "fused"), 4)
    found = [(r["variant"], r["metric"], r["tokens"], r["hidden"]) for r in rows]
    at = (1, 768)
    host_cells = [(v, "host_us", *at) for v in ("eager", "fused", "eager_grad", "fused_grad")]
    assert found == [*host_cells, *[(v, "graph_us", *at) for v in ("eager", "fused")]]


def test_wrong_numbers_are_not_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    Cpu(monkeypatch)
    keep = case.Case.keep

    def wrong(self: case.Case, name: str) -> common.Call:
        call = keep(self, name)
        return (lambda i: call(i) * 1.1) if name == "fused" else call

    monkeypatch.setattr(case.Case, "keep", wrong)
    with pytest.raises(common.BenchError, match="fused: relative error"):
        host.forward_rows(("eager", "fused"), 4)


def test_a_run_covers_every_limit() -> None:
    assert list(host.cells(True, 1)) == ["forward", "step"]
    names = list(host.cells(False, 1))
    assert names == ["forward", "step", "stack", *[f"decode {s}" for s in host.DECODE]]
    assert {limit.shape for limit in host.LIMITS} == {host.ONE, host.STEP, host.STACK, *host.DECODE}


def test_without_a_gpu_it_fails_clearly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert host.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
