"""fusedmlp.warmup with the Triton kernels underneath, in the interpreter."""

import pytest
import torch
from support.interpreter import repair
from support.warmup_suite import WarmupSuite

repair()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


class TestWarmup(WarmupSuite):
    pass
