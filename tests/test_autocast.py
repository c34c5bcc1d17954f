"""Autocast on CPU tensors; the same suite runs on the kernels in tests/interpreter and tests/gpu."""

import pytest
import torch
from support.autocast_suite import AutocastSuite


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestAutocast(AutocastSuite):
    pass
