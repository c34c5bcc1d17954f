"""pytest plug-in of fusedmlp: the fixture ``launches``.

A module of its own, so that a test run that does not use it imports neither fusedmlp nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusedmlp.profiling.assertions import LaunchComparison
    from fusedmlp.profiling.counts import LaunchCounts


class Launches:
    """What the fixture gives: ``launches(fn)`` counts one steady call, ``launches.check`` asserts, ``launches.compare``
    compares two modules. See fusedmlp.profiling.count_launches, assert_launches and compare_launches."""

    def __call__(self, fn: Any, **options: Any) -> LaunchCounts:
        from fusedmlp.profiling import count_launches

        return count_launches(fn, **options)

    def check(self, fn: Any, exactly: int | None = None, **options: Any) -> LaunchCounts:
        from fusedmlp.profiling import assert_launches

        return assert_launches(fn, exactly, **options)

    def compare(self, eager: Any, fused: Any, *inputs: Any, **options: Any) -> LaunchComparison:
        from fusedmlp.profiling import compare_launches

        return compare_launches(eager, fused, *inputs, **options)


@pytest.fixture
def launches() -> Launches:
    """Counts the kernels that code launches; without a CUDA device, what the host dispatches, with a warning."""
    return Launches()
