"""Shared test harness: oracle, accuracy rule, cases, layouts, poison, repairs of Triton's interpreter, a simulator of
Gluon."""

import pytest

pytest.register_assert_rewrite("support.autograd_suite", "support.fault_suite")
