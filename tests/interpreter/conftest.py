"""Tests of the Triton kernels in Triton's interpreter, on CPU tensors.

The interpreter is chosen when `triton` is first imported, for the whole process. So this folder runs in a
pytest of its own (`make test` does both), and refuses to be collected in any other.
"""

from __future__ import annotations

import importlib.util
import os

import numpy
import pytest

NUMPY_LIMIT = (2, 4)

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "tests/interpreter needs TRITON_INTERPRET=1 from the start of the process. Run it alone: "
        "`TRITON_INTERPRET=1 python -m pytest tests/interpreter`; run the rest with "
        "`python -m pytest tests --ignore=tests/interpreter`"
    )
if importlib.util.find_spec("triton") is None:
    raise pytest.UsageError("tests/interpreter needs the package triton, which is not installed")
if tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= NUMPY_LIMIT:
    raise pytest.UsageError(f"Triton's interpreter needs numpy below 2.4, this is {numpy.__version__}")
