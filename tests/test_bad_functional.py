"""Wrong calls of the functional interface on CPU tensors; kernels: tests/interpreter and tests/gpu."""

import pytest
import torch
from support.bad_input_suite import BadInputSuite


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestBadInput(BadInputSuite):
    pass
