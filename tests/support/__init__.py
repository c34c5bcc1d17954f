"""Shared test harness: oracle, accuracy rule, cases, layouts, poison, and repairs of Triton's interpreter."""

import pytest

pytest.register_assert_rewrite("support.autograd_suite", "support.fault_suite")
