"""How candidates are timed against each other, on a pretended device: looks and replays are stand-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fusedmlp.settings.types import Settings
from fusedmlp.tune import compare, timing
from fusedmlp.tune.candidates import CANDIDATES

PAIR, BEST, NEAR, SLOW = CANDIDATES["glu"][:4]


class Device:
    """Runs candidates that take what ``us`` says, and keeps what was asked of it."""

    def __init__(self, us: dict[Settings, float]) -> None:
        self.us = us
        self.broken: set[Settings] = set()
        self.together = 99  # graphs that fit at once
        self.looked: list[Settings] = []
        self.captured: list[tuple[list[Settings], int]] = []
        self.spent = 0.0

    def call(self, candidate: Settings) -> timing.Call:
        return lambda i: candidate  # names itself

    def look_us(self, call: timing.Call) -> float:
        candidate = call(0)
        self.looked.append(candidate)
        if self.us[candidate] < 0:
            raise RuntimeError("no launch")
        return self.us[candidate]

    def capture(self, calls: Mapping[Settings, timing.Call], each: int) -> dict[Settings, float]:
        self.captured.append((list(calls), each))
        if self.broken & set(calls) or len(calls) > self.together:
            raise MemoryError("out of memory")
        return {c: each * self.us[c] for c in calls}

    def settle(self, graphs: Mapping[Settings, float]) -> float:
        return min(graphs.values())

    def replays_us(self, graphs: Any, calls: int, rounds: int, timed: int = 2, lead: int = 1) -> Any:
        self.spent += sum(graphs.values()) * rounds * (timed + lead)
        return {c: [us / calls] * (rounds * timed) for c, us in graphs.items()}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device({PAIR: 30.0, BEST: 10.0, NEAR: 14.9, SLOW: 15.1})
    monkeypatch.setattr(compare, "look_us", found.look_us)
    monkeypatch.setattr(compare, "captured", found.capture)
    monkeypatch.setattr(compare, "settle_graphs", found.settle)
    monkeypatch.setattr(compare, "replays_us", found.replays_us)
    return found


def run(device: Device, sets: int = 3) -> tuple[dict[Settings, list[float]], dict[Settings, str]]:
    left_out: dict[Settings, str] = {}
    calls = [(c, device.call(c)) for c in device.us]
    found = compare.times_of(calls, sets, lambda c, error: left_out.update({c: str(error)}))
    assert [c for c, _ in found] == [c for c in device.us if c not in left_out]  # in the order given
    return dict(found), left_out


def test_the_hopeless_keep_their_look_and_the_others_are_timed_together(device: Device):
    device.us = {PAIR: 300.0, BEST: 100.0, NEAR: 149.0, SLOW: 151.0}
    found, left_out = run(device)
    assert not left_out
    assert device.captured == [([PAIR, BEST, NEAR], 3)]  # 300 us of calls of 100
    assert found[SLOW] == [151.0]
    assert found[BEST] == [100.0] * 16 and len(found[NEAR]) == len(found[PAIR]) == 16
    assert device.spent < 3 * 50_000  # of device time: 0.05 s a candidate


def test_looks_at_short_calls_reject_none(device: Device):
    """They time the host, whose noise is not the candidate's."""
    device.us[SLOW] = 149.0
    found, _ = run(device)
    assert all(len(times) > 1 for times in found.values())


def test_a_pair_that_is_the_fastest_does_not_reject_the_fused(device: Device):
    device.us = {PAIR: 10.0, BEST: 100.0, NEAR: 149.0, SLOW: 151.0}
    found, _ = run(device)
    assert [len(found[c]) for c in device.us] == [16, 16, 16, 1]


def test_long_calls_are_timed_few_times(device: Device):
    device.us = {PAIR: 30_000.0, BEST: 20_000.0, NEAR: 21_000.0, SLOW: 90_000.0}
    found, _ = run(device, sets=1)
    assert [len(found[c]) for c in device.us] == [3, 3, 3, 1]
    assert device.captured == [([PAIR, BEST, NEAR], 1)]
    assert device.spent == 3 * 71_000


@pytest.mark.parametrize("broken", [{NEAR}, {NEAR, PAIR}, {PAIR, BEST, NEAR}])
def test_one_that_cannot_be_captured_is_named_and_the_others_are_timed(device: Device, broken: set[Settings]):
    device.broken = broken
    found, left_out = run(device)
    assert left_out == dict.fromkeys(broken, "out of memory")
    assert all(len(found[c]) >= 14 for c in {PAIR, BEST, NEAR} - broken)


def test_what_does_not_fit_together_is_timed_one_by_one(device: Device):
    device.together = 1
    found, left_out = run(device)
    assert not left_out and len(found[NEAR]) == 16


def test_one_that_fails_at_the_look_is_left_out(device: Device):
    device.us[BEST] = -1.0
    found, left_out = run(device)
    assert left_out == {BEST: "no launch"} and device.looked == [PAIR, BEST, NEAR, SLOW]
    assert len(found[SLOW]) == len(found[NEAR]) == 16


def test_nothing_to_time(device: Device):
    device.us = {}
    assert run(device) == ({}, {}) and not device.captured


@pytest.mark.parametrize("sets, us, calls", [(3, 10.0, 30), (24, 4.0, 48), (24, 1.0, 48), (2, 400.0, 2), (1, 9e4, 1)])
def test_a_graph_holds_every_set_as_often(sets: int, us: float, calls: int):
    assert compare.graph_calls(sets, us) == calls
