"""The operations on CPU tensors: the accuracy rule over covering cases, and the list of known faults.

The same suite runs on the kernels in tests/interpreter and tests/gpu.
"""

import pytest
import torch
from support.cases import FULL_LEADS, FULL_WIDTHS, LIGHT_LEADS, LIGHT_WIDTHS, covering_cases
from support.fault_suite import FaultSuite
from support.operations import OPERATIONS
from support.runner import check_op

CASES = [case for op in OPERATIONS for case in covering_cases(op, LIGHT_LEADS, LIGHT_WIDTHS)]
# Large shapes once each, in the dtype that a CPU multiplies fast.
LARGE = [c for op in OPERATIONS for c in covering_cases(op, FULL_LEADS, FULL_WIDTHS, [torch.float32])[::6]]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.id)
def test_accuracy(case, device):
    check_op(case, device)


class TestFaults(FaultSuite):
    pass
