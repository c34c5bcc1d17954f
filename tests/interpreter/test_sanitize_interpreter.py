"""The cases of bench/sanitize.py in the interpreter: their results are right, and their kernels are launched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.interpreter import repair

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import sanitize

repair()


@pytest.mark.parametrize("case", [case for case in sanitize.CASES if case.family != "gluon"], ids=str)
def test_a_case_is_right(case: sanitize.Case) -> None:
    assert sanitize.check(case, "cpu") is None
