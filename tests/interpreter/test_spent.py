"""What was kept is written over by the last backward alone: each family of kernels in the interpreter."""

import pytest
import torch
from support.interpreter import repair
from support.spent_suite import SpentSuite

from fusedmlp import settings

repair()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(params=["pointer", "tma", "pair"], autouse=True)
def family(request):
    with settings.override(family=request.param):
        yield request.param


class TestSpent(SpentSuite):
    pass
