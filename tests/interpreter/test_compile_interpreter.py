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
    # One tile of tokens and a few: what a thousand cost the interpreter shows nothing more.
    token_counts = (7, 8, 64, 65, 130, 1, 2, 0, 130)
    more_token_counts = (3, 33, 66)
