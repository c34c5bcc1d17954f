"""Timing under load, on a pretended device whose clock falls while it works and recovers while it idles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402
from fusedmlp.profiling.launches import DeviceEvent  # noqa: E402
from fusedmlp.tune import timing  # noqa: E402

BURST, SUSTAINED = 1.0, 1.25  # of a kernel's time: at the clock of a rested card, and at that of a hot one
HOT_AFTER = 20_000.0  # us of work without a pause


class Card:
    """Calls of two kernels each. The clock falls HOT_AFTER of work, and a synchronisation gives it time to recover."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.calls: list[tuple[str, int]] = []
        self.seen: list[DeviceEvent] | None = None

    def rest(self) -> None:
        self.busy = 0.0

    def call(self, name: str, us: float) -> common.Call:
        def run(i: int) -> None:
            self.calls.append((name, i))
            for part in (0.25, 0.75):
                took = part * us * (SUSTAINED if self.busy > HOT_AFTER else BURST)
                if self.seen is not None:
                    self.seen.append(DeviceEvent(f"{name}.{part}", "kernel", self.now, took))
                self.now += took
                self.busy += took

        return run

    def capture(self, fn: Callable[[], Any]) -> list[DeviceEvent]:
        self.rest()  # the profiler's start
        self.seen = []
        fn()
        found, self.seen = self.seen, None
        self.rest()
        return found

    def events_us(self, fn: Callable[[], Any], repeats: int) -> list[float]:
        found = []
        for _ in range(repeats):
            begin = self.now
            fn()
            found.append(self.now - begin)
        self.rest()
        return found

    def graph(self, call: common.Call, calls: int) -> Any:
        def replay() -> None:
            for i in range(calls):
                call(i)

        return SimpleNamespace(replay=replay)

    def between_events(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
        begin = self.now
        fn()
        took = self.now - begin
        return SimpleNamespace(elapsed_time=lambda end: took / 1e3), None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    monkeypatch.setattr(common, "capture_events", found.capture)
    monkeypatch.setattr(timing, "events_us", found.events_us)
    monkeypatch.setattr(timing, "_between_events", found.between_events)
    monkeypatch.setattr(torch.cuda, "synchronize", found.rest)
    return found


@pytest.mark.parametrize("us", [1500.0, 13_000.0, 90_000.0])
def test_the_kernel_time_of_each_alone_is_that_of_sustained_load(card: Card, us: float) -> None:
    found = common.kernel_alone_us({"eager": card.call("eager", us), "fused": card.call("fused", us / 2)}, sets=2)
    for name, alone in (("eager", us), ("fused", us / 2)):
        assert found[name] == pytest.approx([alone * SUSTAINED] * len(found[name]))
        assert len(found[name]) >= (12 if alone < 20_000 else 6)
        work = sum(1 for n, _ in card.calls if n == name) * alone
        assert work < max(0.42e6, 17 * alone)  # what a variant and pass may cost


def test_calls_that_count_rotate_over_the_sets_and_stay_few(card: Card) -> None:
    found = common.kernel_alone_us({"tiny": card.call("tiny", 4.0)}, sets=5)
    assert len(found["tiny"]) == 3 * 24
    assert {i for _, i in card.calls} == set(range(5))
    assert len(card.calls) < 3 * (timing.SETTLE_CALLS + 100)  # each may cost the host a millisecond


def test_calls_that_are_not_alike_are_refused(card: Card) -> None:
    once: list[int] = []
    plain, extra = card.call("a", 10.0), card.call("b", 1.0)

    def call(i: int) -> None:
        plain(i)
        if card.seen is not None and not once:
            once.append(i)
            extra(i)

    with pytest.raises(common.BenchError, match="not alike"):
        common.kernel_alone_us({"a": call}, sets=2)


@pytest.mark.parametrize("us", [1500.0, 90_000.0])
def test_kernel_times_of_variants_in_turn(card: Card, us: float) -> None:
    calls = {
        "eager": card.call("eager", us),
        "fused": card.call("fused", us / 2),
        "two": lambda i: (short(i), short(i)),
    }
    short = card.call("two", us / 8)
    found = common.kernel_us(calls, sets=3)
    for name, alone in (("eager", us), ("fused", us / 2), ("two", us / 4)):
        assert found[name] == pytest.approx([alone * SUSTAINED] * len(found[name])), "at the clock under load"
        assert len(found[name]) == 3 * common.profiled_calls(us * 1.75)[1]
    assert {i for _, i in card.calls} == set(range(3))
    counted = [name for name, _ in card.calls[-8:]]
    assert sorted(counted) == ["eager"] * 2 + ["fused"] * 2 + ["two"] * 4, "two turns, one call of each"


def test_turns_with_other_kernels_are_refused(card: Card) -> None:
    seen: list[int] = []
    plain, extra = card.call("a", 10.0), card.call("b", 1.0)

    def call(i: int) -> None:
        plain(i)
        seen.append(i)
        if card.seen is not None and len(seen) > 60:
            extra(i)

    with pytest.raises(common.BenchError, match="not alike"):
        common.kernel_us({"a": call}, sets=2)


def test_profiled_calls() -> None:
    assert common.profiled_calls(1.0) == (64, 24)
    assert common.profiled_calls(1500.0) == (17, 6)
    assert common.profiled_calls(13_000.0) == (2, 4)
    assert common.profiled_calls(90_000.0) == (1, 2)


def test_replays_of_graphs_are_timed_under_load_and_in_turn(card: Card) -> None:
    graphs = {n: card.graph(card.call(n, us), 3) for n, us in (("a", 500.0), ("b", 300.0))}
    assert timing.settle_graphs(graphs) == pytest.approx(900.0)
    found = timing.replays_us(graphs, 3, rounds=4)
    assert found == {"a": pytest.approx([500 * SUSTAINED] * 8), "b": pytest.approx([300 * SUSTAINED] * 8)}
    order = [n for n, i in card.calls[-4 * 2 * 9 :] if i == 0]
    assert order == ["a"] * 3 + ["b"] * 6 + ["a"] * 6 + ["b"] * 6 + ["a"] * 3  # a lead and two timed ones a turn


def test_input_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda: 50)
    assert [common.input_sets(n) for n in (1, 10, 40, 100, 399, 400)] == [24, 13, 4, 2, 2, 1]
