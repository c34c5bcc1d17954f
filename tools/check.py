"""Run the checks of the repository, all of them even where one fails, and exit 1 if any did.

    python tools/check.py lint    ruff check, ruff format --check, mypy
    python tools/check.py test    lint, then the tests, then the tests that run in Triton's interpreter
    python tools/check.py gpu     the GPU tests, then the suite on the device; a missing device is an error
    python tools/check.py hub     the core of the GPU tests on a Hub tree, and its speed beside the package's;
                                  on the tree that FUSEDMLP_HUB_TREE names, else on one that is built first

Run it with the Python of .venv/test. Where that environment stands on a PyTorch that was there before
(tools/make_env.py) and a tool could not be installed, the check that needs it is named as not run. Everywhere
else that is a failure.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ["-n", os.environ.get("TEST_WORKERS", "2"), "--dist", "worksteal", "--durations=10"]
PYTEST = ("pytest", "pytest_timeout")
INTERPRETER = "tests/interpreter"
NUMPY_LIMIT = (2, 4)


@dataclass
class Check:
    """One command of `python -m ...`, the module it needs, and variables to set."""

    name: str
    args: list[str]
    needs: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


LINT = [
    Check("ruff check", ["ruff", "check", "."], ("ruff",)),
    Check("ruff format", ["ruff", "format", "--check", "."], ("ruff",)),
    Check("mypy", ["mypy"], ("mypy",)),
]
TESTS = Check("tests", ["pytest", *WORKERS, "tests", f"--ignore={INTERPRETER}"], (*PYTEST, "xdist"))
INTERPRETED = Check(
    "interpreter tests",
    ["pytest", *WORKERS, INTERPRETER],
    (*PYTEST, "xdist", "triton", "old numpy"),
    {"TRITON_INTERPRET": "1"},
)
ON_DEVICE = {"FUSEDMLP_REQUIRE_GPU": "1"}
# Compiling is most of the time, so many workers share the device; launches and memory are counted by process.
ALONE = ["tests/gpu/test_large.py", "tests/gpu/test_two_devices.py"]  # tens of GB each; all devices in one process
GPU_WORKERS = ["-n", os.environ.get("GPU_WORKERS", "8"), "--dist", "worksteal", "--durations=10"]
GPU_TESTS = Check(
    "GPU tests",
    ["pytest", "-m", "gpu", "tests/gpu", *[f"--ignore={file}" for file in ALONE], *GPU_WORKERS],
    (*PYTEST, "xdist"),
    ON_DEVICE,
)
GPU_ALONE = Check("GPU tests without workers", ["pytest", "-m", "gpu", *ALONE], PYTEST, ON_DEVICE)
GPU_SUITE = Check(
    "suite on the device",
    ["pytest", *WORKERS, "tests", f"--ignore={INTERPRETER}", "--ignore=tests/gpu"],
    (*PYTEST, "xdist"),
    ON_DEVICE,
)
HUB_TREE = os.environ.get("FUSEDMLP_HUB_TREE") or "build/hub"
HUB_BUILD = Check("Hub tree", ["fusedmlp", "hub", "build", "--output", HUB_TREE], ("setuptools",))
HUB_CORE = [f"tests/gpu/test_{name}.py" for name in ("suite", "launch_counts", "compile_gpu", "graphs", "layers_gpu")]
HUB_TESTS = Check(
    "GPU tests on the Hub tree",
    ["pytest", "-m", "gpu", *HUB_CORE, *GPU_WORKERS],
    (*PYTEST, "xdist", "kernels"),
    ON_DEVICE | {"FUSEDMLP_HUB_TREE": HUB_TREE},
)
HUB_SPEED = Check("speed of the Hub tree", ["bench.hub", HUB_TREE], ("kernels",))
HUB = [*([] if os.environ.get("FUSEDMLP_HUB_TREE") else [HUB_BUILD]), HUB_TESTS, HUB_SPEED]
MODES = {"lint": LINT, "test": [*LINT, TESTS, INTERPRETED], "gpu": [GPU_TESTS, GPU_ALONE, GPU_SUITE], "hub": HUB}


def version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def lacks(need: str) -> str | None:
    """Why a need is not met, or None where it is."""
    if need == "old numpy":
        version = metadata.version("numpy")
        too_new = version_numbers(version)[:2] >= NUMPY_LIMIT
        return f"Triton's interpreter needs numpy below 2.4, this is {version}" if too_new else None
    if need == "triton" and sys.platform != "linux":
        return "Triton has no build for this platform"
    return None if importlib.util.find_spec(need) else f"{need} is not installed"


def may_leave_out() -> bool:
    """Whether a check that lacks its tool may be left out: beside an outer PyTorch, or off Linux."""
    stamp = Path(sys.prefix) / "stamp.json"
    outer = stamp.is_file() and json.loads(stamp.read_text()).get("outer", False)
    return outer or sys.platform != "linux"


def run(check: Check) -> bool:
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *check.args]
    shown = "".join(f"{key}={value} " for key, value in check.variables.items())
    print(f"\n>>> {check.name}: {shown}python -m {' '.join(check.args)}", flush=True)
    start = time.monotonic()
    code = subprocess.call(command, cwd=ROOT, env={**variables, **check.variables})
    outcome = "ok" if code == 0 else f"FAILED (exit {code})"
    print(f"<<< {check.name}: {outcome}, {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in MODES:
        sys.exit(f"usage: python tools/check.py {{{','.join(MODES)}}}")
    failed, left_out = [], []
    for check in MODES[sys.argv[1]]:
        reasons = [reason for reason in map(lacks, check.needs) if reason]
        if reasons and may_leave_out():
            left_out.append(f"{check.name}: {'; '.join(reasons)}")
        elif reasons:
            failed.append(f"{check.name}: {'; '.join(reasons)}")
        elif not run(check):
            failed.append(check.name)
    print()
    for text in left_out:
        print(f"!!! NOT RUN: {text}")
    for text in failed:
        print(f"!!! FAILED: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
