"""The suite on the Triton kernels in the interpreter, once with each kernel family forced."""

import pytest
import torch
from support.autograd_suite import AutogradSuite
from support.cases import SMALL_LEADS, SMALL_WIDTHS, covering_cases
from support.fault_suite import FaultSuite
from support.interpreter import repair
from support.operations import OPERATIONS
from support.runner import check_op
from support.saved_suite import SavedMemorySuite

from fusedmlp import settings

repair()

CASES = [case for op in OPERATIONS for case in covering_cases(op, SMALL_LEADS, SMALL_WIDTHS)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(params=["pointer", "tma"], autouse=True)
def family(request):
    """Forces the kernel family of every call of a test."""
    with settings.override(family=request.param):
        yield request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_accuracy(case, device):
    check_op(case, device)


class TestFaults(FaultSuite):
    pass


class TestAutograd(AutogradSuite):
    pass


class TestSavedMemory(SavedMemorySuite):
    pass
