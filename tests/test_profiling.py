"""Launch counting without a GPU: the event arithmetic, the retries, and the errors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from fusedmlp.profiling import DeviceEvent, ProfilerError, capture_events, count_launches, summarise
from fusedmlp.profiling import launches as module

PROBE = "probe_kernel"


def event(name: str, start: float, duration: float = 2.0, device: Any = DeviceType.CUDA, **more: Any) -> Any:
    """An event as torch.profiler gives it, with the fields that every supported release has."""
    time_range = SimpleNamespace(start=start, end=start + duration)
    return SimpleNamespace(name=name, device_type=device, time_range=time_range, **more)


def kernels(*names: str) -> list[DeviceEvent]:
    return [DeviceEvent(name, "kernel", float(i), 1.0) for i, name in enumerate(names)]


def test_summarise_sorts_by_start_and_lists_copies_apart() -> None:
    counts = summarise(
        [
            event("second", 20.0, 5.0),
            event("Memcpy HtoD (Pageable -> Device)", 3.0),
            event("first", 10.0, 1.5),
            event("second", 30.0, 5.0),
            event("Memset (Device)", 4.0),
            event("Memcpy DtoD (Device -> Device)", 40.0),
        ]
    )
    assert (counts.kernels, counts.memcpy, counts.memset) == (3, 2, 1)
    assert counts.names == ["first", "second", "second"]
    assert counts.by_name == {"second": 2, "first": 1}
    assert counts.kernel_us == pytest.approx(11.5)
    assert "3 kernels, 2 memcpy, 1 memset" in str(counts)


@pytest.mark.parametrize(
    "other",
    [
        event("aten::mm", 1.0, device=DeviceType.CPU),
        event("cudaLaunchKernel", 1.0, device=DeviceType.CPU),
        event("my range", 1.0, is_user_annotation=True),
        event("my range", 1.0, is_user_annotation=False, activity_type="gpu_user_annotation"),
        event("ProfilerStep#3", 1.0),
        event("Context Sync", 1.0),
        event("Stream Wait Event", 1.0, activity_type="cuda_sync"),
    ],
    ids=lambda e: e.name,
)
def test_what_is_not_device_work_is_not_counted(other: Any) -> None:
    real = event("gemm", 5.0, is_user_annotation=False, activity_type="kernel")
    assert summarise([other, real]).names == ["gemm"]


def test_steps_give_numbers_per_call() -> None:
    copies = [DeviceEvent("Memcpy DtoD", "memcpy", 0.5, 9.0), DeviceEvent("Memcpy DtoD", "memcpy", 2.5, 9.0)]
    counts = summarise(kernels("a", "b", "a", "b") + copies, steps=2)
    assert (counts.kernels, counts.memcpy, counts.names) == (2, 1, ["a", "b"])
    assert counts.kernel_us == 2.0


@pytest.mark.parametrize("names", [("a", "b", "a"), ("a", "b", "a", "a")], ids=["number", "names"])
def test_calls_that_are_not_alike_raise(names: tuple[str, ...]) -> None:
    with pytest.raises(ProfilerError, match="warmup"):
        summarise(kernels(*names), steps=2)


def test_summarise_refuses_zero_steps() -> None:
    with pytest.raises(ValueError, match="got 0"):
        summarise(kernels("a"), steps=0)


def test_events_of_the_real_profiler_on_a_cpu_are_no_kernels() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as p:
        torch.ones(4) + 1
    events = p.events()
    assert len(events) > 0
    assert summarise(events).kernels == 0


class ScriptedFrame:
    """Stands in for a profiler session: hands out prepared captures one after another."""

    captures: list[list[DeviceEvent]] = []
    started = 0
    aborted = 0

    def start(self) -> None:
        type(self).started += 1

    def abort(self) -> None:
        type(self).aborted += 1

    def finish(self) -> list[DeviceEvent]:
        return self.captures.pop(0)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ScriptedFrame]]:
    class Frame(ScriptedFrame):
        captures: list[list[DeviceEvent]] = []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_Frame", Frame)
    module._probe_name.cache_clear()
    yield Frame
    module._probe_name.cache_clear()


GOOD_PROBE = kernels(PROBE, PROBE)


def test_an_incomplete_capture_is_thrown_away_and_repeated(frames: type[ScriptedFrame]) -> None:
    calls = []
    frames.captures = [
        GOOD_PROBE,
        [],  # nothing seen
        kernels("gemm", PROBE),  # the beginning is lost
        kernels(PROBE, "gemm"),  # the end is lost
        kernels(PROBE, "gemm", "act", PROBE),
    ]
    counts = count_launches(lambda: calls.append(1), warmup=2)
    assert counts.names == ["gemm", "act"]
    assert len(calls) == 2 + 4


def test_copies_around_the_probes_do_not_belong_to_the_block(frames: type[ScriptedFrame]) -> None:
    outside = DeviceEvent("Memcpy DtoH", "memcpy", 9.0, 1.0)
    inside = DeviceEvent("Memset (Device)", "memset", 1.5, 1.0)
    first, gemm, last = kernels(PROBE, "gemm", PROBE)
    frames.captures = [GOOD_PROBE, [outside, first, inside, gemm, last, outside]]
    counts = count_launches(lambda: None)
    assert (counts.kernels, counts.memcpy, counts.memset) == (1, 0, 1)


def test_captures_that_stay_incomplete_raise(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE, *([kernels("gemm")] * 3)]
    with pytest.raises(ProfilerError, match="each of 3 attempts"):
        capture_events(lambda: None, attempts=3)


def test_a_profiler_that_sees_no_kernels_raises_before_anything_is_counted(
    frames: type[ScriptedFrame],
) -> None:
    frames.captures = [[] for _ in range(5)]
    calls: list[int] = []
    with pytest.raises(ProfilerError, match="shows no kernels"):
        capture_events(lambda: calls.append(1))
    assert calls == []
    assert frames.started == 5


def test_no_launch_at_all_raises_unless_allowed(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE, *([kernels(PROBE, PROBE)] * 3)]
    with pytest.raises(ProfilerError, match="Are the tensors on the GPU"):
        count_launches(lambda: None, attempts=2)
    assert len(frames.captures) == 1  # it looked twice before it gave up
    assert count_launches(lambda: None, attempts=1, allow_empty=True).kernels == 0


def test_an_error_in_the_function_ends_the_profiler(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE]

    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        count_launches(broken, warmup=0)
    assert frames.aborted == 1


def test_context_manager(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE, kernels(PROBE, "gemm", "gemm", PROBE)]
    with count_launches() as c:
        with pytest.raises(ProfilerError, match="block has ended"):
            _ = c.kernels
    assert (c.kernels, c.memcpy, c.memset) == (2, 0, 0)
    assert c.names == ["gemm", "gemm"]
    assert c.by_name == {"gemm": 2}
    assert c.kernel_us == 2.0


def test_context_manager_raises_on_an_incomplete_capture(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE, kernels("gemm", PROBE)]
    with pytest.raises(ProfilerError, match="lost part"):
        with count_launches():
            pass


def test_context_manager_raises_where_nothing_ran(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE, kernels(PROBE, PROBE)]
    with pytest.raises(ProfilerError, match="allow_empty"):
        with count_launches():
            pass


def test_context_manager_passes_errors_of_the_block_on(frames: type[ScriptedFrame]) -> None:
    frames.captures = [GOOD_PROBE]
    with pytest.raises(KeyError, match="mine"):
        with count_launches():
            raise KeyError("mine")
    assert frames.aborted == 1


def test_device_events_need_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls: list[int] = []
    with pytest.raises(ProfilerError, match="needs a CUDA device"):
        capture_events(lambda: calls.append(1))
    assert calls == []


@pytest.mark.parametrize("bad", [{"warmup": -1}, {"steps": 0}, {"attempts": 0}], ids=str)
def test_bad_arguments(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="are needed, got"):
        count_launches(lambda: None, **bad)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="got Tensor"):
        count_launches(torch.ones(1))  # type: ignore[call-overload]
