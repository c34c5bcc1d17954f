"""When calls are written down, and where they cannot be steady. tests/interpreter/test_steady.py has the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmlp import explain, launch, settings, steady


@pytest.fixture
def plan(monkeypatch) -> Any:
    monkeypatch.setattr(steady, "_connected", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return SimpleNamespace(calls={}, attempts=0, device_index=3)


def test_from_the_second_call_of_a_kind_on(plan):
    assert [steady.ripe(plan, "a") for _ in range(3)] == [False, True, True]
    assert [steady.ripe(plan, "b") for _ in range(2)] == [False, True]
    plan.attempts = steady.MAX_ATTEMPTS
    assert not steady.ripe(plan, "a")


def test_not_what_a_table_would_not_answer(plan, monkeypatch):
    """Such calls would be written down each time; and under overridden settings for the calls after them too."""
    steady.ripe(plan, "a")
    with settings.override(stages=2):
        assert not steady.ripe(plan, "a")
    with explain.recording():
        assert not steady.ripe(plan, "a")
    with TorchFunctionMode():
        assert not steady.ripe(plan, "a")
    with torch.device("cpu"):
        assert steady.ripe(plan, "a")
    with TorchDispatchMode():
        assert not steady.ripe(plan, "a")
    with torch.autograd.forward_ad.dual_level():
        assert not steady.ripe(plan, "a")
    steady.paused.append(None)
    try:
        assert not steady.ripe(plan, "a")
    finally:
        steady.paused.clear()
    for place, name, value in [
        (launch, "_hooked", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: True),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (plan, "device_index", None),
        (steady, "_connected", False),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert not steady.ripe(plan, "a")
    assert steady.ripe(plan, "a")


class Launcher:
    """``fusedmlp._launcher``, which connects or refuses to."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.error, self.parts = error, {}

    def connect(self, **parts: Any) -> None:
        self.parts = parts
        if self.error is not None:
            raise self.error


@pytest.fixture
def connectable(monkeypatch):
    monkeypatch.setattr(steady, "_connected", None)
    monkeypatch.setattr(steady, "_launcher", None)
    monkeypatch.setattr(steady, "_tables", {})
    monkeypatch.setattr(steady, "by_options", {})
    monkeypatch.setattr(launch, "known_triton", lambda: True)
    monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", "a capsule", raising=False)
    for name in ("alloc", "delete"):
        monkeypatch.setattr(torch._C, f"_cuda_cudaCachingAllocator_raw_{name}", name, raising=False)

    def connect(launcher: Any) -> bool:
        monkeypatch.setattr(launch, "_launcher", launcher)
        return steady.available()

    return connect


def test_connects_once(connectable):
    launcher = Launcher()
    assert connectable(launcher) and steady._launcher is launcher
    assert launcher.parts["exchange"] == "a capsule" and launcher.parts["busy"] is steady._busy
    launcher.error = RuntimeError
    assert steady.available()


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_an_unknown_exchange_interface(connectable, error):
    assert not connectable(Launcher(error)) and steady.table("mlp", "relu", 1) is None


def test_what_is_missing(connectable, monkeypatch):
    for place, name, value in [
        (launch, "known_triton", lambda: False),
        (Tensor, "__dlpack_c_exchange_api__", None),
        (torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None),
        (torch._C, "_cuda_cudaCachingAllocator_raw_delete", None),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            patch.setattr(steady, "_connected", None)
            assert not connectable(Launcher())
    assert not connectable(None)
