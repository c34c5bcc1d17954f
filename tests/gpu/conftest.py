"""Fixtures of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedmlp import plan


def forget_lone_layers() -> None:
    for key in [key for key, found in plan._plans.items() if found.op == "linear_act"]:
        del plan._plans[key]


@pytest.fixture
def lone_layers_fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lone float32 layer goes PyTorch's way, where tests would see none of our code: cuBLAS and our pointwise kernels
    serve it instead."""
    monkeypatch.setattr(plan, "_pair_is_forced", lambda: True)
    forget_lone_layers()
    yield
    forget_lone_layers()
