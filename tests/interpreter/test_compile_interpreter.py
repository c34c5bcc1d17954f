"""torch.compile and opcheck with the Triton kernels underneath, in the interpreter."""

import pytest
import torch
from support.compile_suite import CompileSuite
from support.interpreter import repair

repair()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestCompile(CompileSuite):
    pass
