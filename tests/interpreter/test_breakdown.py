"""bench/breakdown.py: every part can be run alone, with the arguments of a real call."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.interpreter import repair

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import breakdown

repair()


def test_every_part_is_timed() -> None:
    text = breakdown.report("cpu", torch.float32, rounds=1, calls=2)
    found = dict(re.findall(r"^ *(\S.*?) {2,}(\d+\.\d\d) +\d+\.\d\d +\d+\.\d\d$", text, re.MULTILINE))
    assert {"module call", "plan look-up", "last product", "step of an empty Function"} <= set(found)
    assert text.count("an empty Function with as many operands") == 2  # by both ways of running the backward


def test_a_layer_that_goes_pytorchs_way_is_refused() -> None:
    with pytest.raises(RuntimeError, match="float64"):
        breakdown.Layer(2, 16, 32, "cpu", torch.float64)
