"""What every test stands on: seeds, restored global settings, the `gpu` marker, threads per worker.

Tests marked `gpu`, and all tests under tests/gpu, need a CUDA device. Without one they are skipped and
counted in a section of their own at the end; with FUSEDMLP_REQUIRE_GPU=1 they are errors instead. So are tests of
the compiled launcher where C cannot be compiled, or PyTorch is too old for what they look at, and tests of what the
Gluon kernels are launched with under a Triton where other kernels serve.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

# On CPUs with AMX, oneDNN reads what lies behind the rows of a bf16 operand whose length is no multiple of 32
# (uxlfoundation/oneDNN issue 5717): eager PyTorch's own NaN, which no test of what we read could tell from ours.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy
import pytest
import torch
from support.hub_tree import use_tree_of_environment
from support.local_hub import NO_TRANSFORMERS
from support.native import NEEDS_COMPILER, NEEDS_EXCHANGE

SEED = 20250607
TESTED = use_tree_of_environment()
# Beside a PyTorch that was there before, without a network, there may be no `kernels`.
HAS_KERNELS = importlib.util.find_spec("kernels") is not None
collect_ignore = [] if HAS_KERNELS else ["hub", "test_layers.py"]
GPU_FOLDER = Path(__file__).parent / "gpu"
NO_DEVICE = "no CUDA device"
ONE_DEVICE = "one CUDA device, a second is needed"


def has_gpu() -> bool:
    return torch.cuda.is_available()


def gpu_required() -> bool:
    return os.environ.get("FUSEDMLP_REQUIRE_GPU", "0") not in ("", "0")


def spread_over_devices() -> None:
    """Each worker of pytest-xdist sees one device, the next worker the next one. CUDA is not in use yet: it reads the
    variable once, and PyTorch counts devices without it."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if worker and len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(worker[2:]) % len(names)]


def pytest_configure(config: pytest.Config) -> None:
    spread_over_devices()
    # Workers share the cores: PyTorch's default is all cores for each of them.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ["FUSEDMLP_SETTINGS"] = ""  # the shipped tables alone, not one that this machine's user tuned


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_FOLDER in item.path.parents:
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or has_gpu():
        return
    if gpu_required():
        pytest.fail(f"{NO_DEVICE}, and FUSEDMLP_REQUIRE_GPU is set", pytrace=False)
    pytest.skip(NO_DEVICE)


@pytest.fixture
def second_device() -> torch.device:
    """A device that is not the current one. Tests that need it run in one process: a worker of several sees one."""
    if torch.cuda.device_count() < 2:
        pytest.skip(ONE_DEVICE)
    return torch.device("cuda", 1)


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if has_gpu() else "none"
    interpreter = os.environ.get("TRITON_INTERPRET", "0")
    return f"{TESTED}\ntorch {torch.__version__}, CUDA device: {device}, TRITON_INTERPRET={interpreter}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from support.gluon import NEEDS_GLUON  # it imports the package: not before it is known which

    skipped = terminalreporter.stats.get("skipped", [])
    for what, reason in (
        ("GPU", NO_DEVICE),
        ("GPU", ONE_DEVICE),
        ("LAUNCHER", NEEDS_COMPILER),
        ("LAUNCHER", NEEDS_EXCHANGE),
        ("GLUON", NEEDS_GLUON),
        ("HUB", NO_TRANSFORMERS),
    ):
        count = sum(reason in str(report.longrepr) for report in skipped)
        if count:
            terminalreporter.section(f"{what} TESTS SKIPPED: {count} ({reason})", sep="!", red=True, bold=True)
    if not HAS_KERNELS:
        said = "HUB TESTS NOT RUN: the package kernels is not installed"
        terminalreporter.section(said, sep="!", red=True, bold=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """PyTorch's global settings that tests change, put back however the test ends."""
    precision = torch.get_float32_matmul_precision()
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def gluon_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings choose as under a Triton whose Gluon serves, for tests of the choice: nothing may be launched."""
    monkeypatch.setattr("fusedmlp.settings.device._has_gluon", lambda: True)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that the suite runs on: the GPU where there is one."""
    return torch.device("cuda" if has_gpu() else "cpu")
