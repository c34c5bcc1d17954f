"""The autograd contract on CPU tensors; the suites run on kernels in tests/interpreter and tests/gpu."""

import pytest
import torch
from support.autograd_suite import AutogradSuite
from support.functorch_suite import FunctorchSuite


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestAutograd(AutogradSuite):
    pass


class TestFunctorch(FunctorchSuite):
    must_be_right = True
