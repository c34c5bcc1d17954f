"""Autocast, torch.func and wrong input with the Triton kernels underneath, in the interpreter."""

import pytest
import torch
from support.autocast_suite import AutocastSuite
from support.bad_input_suite import BadInputSuite
from support.functorch_suite import FunctorchSuite
from support.interpreter import repair

repair()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestAutocast(AutocastSuite):
    pass


class TestFunctorch(FunctorchSuite):
    pass


class TestBadInput(BadInputSuite):
    pass
