"""What the benchmarks share: the results format, the timing helpers, and the ceilings of the card they ran
on.

A result file is one run: {"bench", "date", "commit", "gpu", "driver", "torch", "triton", "packages",
"ceilings", "rows"}. A row is flat and holds one metric of one variant at one shape, as median, low and high
of n values.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fusedmlp.profiling import capture_events, count_launches
from fusedmlp.tune.timing import Call, events_us, look_us, settle, turns
from fusedmlp.tune.timing import graph_alone_us as graph_alone_us
from fusedmlp.tune.timing import graph_us as graph_us
from fusedmlp.tune.timing import input_sets as input_sets
from fusedmlp.tune.timing import relative_error as relative_error

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PASSES = ("forward", "backward", "step")
METRICS = (
    *("kernel_us", "kernel_alone_us", "graph_us", "graph_alone_us", "wall_us", "host_us"),
    *("kernels", "peak_bytes", "saved_bytes", "rel_error"),
)
ROW_KEYS = (
    *("op", "pass", "tokens", "hidden", "intermediate", "dtype", "bias", "variant", "metric"),
    *("median", "low", "high", "n"),
)
TIMES = ("kernel_us", "kernel_alone_us", "graph_us", "graph_alone_us", "wall_us")
GRAPHS_UP_TO = 2048  # tokens for which the grid takes graph replays, where launch gaps count; kernel time above
FILE_KEYS = ("bench", "date", "commit", "gpu", "driver", "torch", "triton", "packages", "ceilings", "rows")
PACKAGES = (
    "fusedmlp",
    "kernels",
    "numpy",
    "transformers",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "flash-swiglu-mlp",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
)

# Shipped settings are what is measured, not a table that this machine's user tuned; set it to measure that one.
os.environ.setdefault("FUSEDMLP_SETTINGS", "")


class BenchError(RuntimeError):
    """A benchmark cannot run here, or was asked for something that does not exist."""


# ---------------------------------------------------------------------------------------------- results


def row(
    op: str,
    pass_: str,
    shape: tuple[int, int, int],
    variant: str,
    metric: str,
    values: Sequence[float],
    *,
    dtype: str = "bfloat16",
    bias: bool = False,
) -> dict[str, Any]:
    """One row. shape: (tokens, hidden, intermediate). values: all measurements, in the metric's own unit."""
    if pass_ not in PASSES:
        raise BenchError(f"pass must be one of {', '.join(PASSES)}, got {pass_!r}")
    if metric not in METRICS:
        raise BenchError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if not values or not all(math.isfinite(v) for v in values):
        raise BenchError(f"{metric} of {variant} at {shape} needs finite values, got {list(values)}")
    tokens, hidden, intermediate = shape
    return {
        "op": op,
        "pass": pass_,
        "tokens": tokens,
        "hidden": hidden,
        "intermediate": intermediate,
        "dtype": dtype,
        "bias": bias,
        "variant": variant,
        "metric": metric,
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "n": len(values),
    }


def grid_metric(tokens: int) -> str:
    """What the grid measures at so many tokens."""
    return "graph_us" if tokens <= GRAPHS_UP_TO else "kernel_us"


def gpu_slug(name: str) -> str:
    """Folder name for a GPU: the model in lower case, without the maker. "NVIDIA H200" -> "h200"."""
    words = re.sub(r"\b(nvidia|amd|geforce|instinct|radeon)\b", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Commit of the checkout, with "-dirty" where tracked files differ; BENCH_COMMIT names it where git
    cannot."""
    named = os.environ.get("BENCH_COMMIT")
    if named:
        return named
    head = _output("git", "rev-parse", "HEAD")
    # What the benchmarks write themselves does not make the measured code another one.
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return head + ("-dirty" if changed else "") if head else "unknown"


@cache
def driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else "unknown"


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def need_gpu() -> str:
    """Name of the current CUDA device; raises BenchError where there is none."""
    if not torch.cuda.is_available():
        raise BenchError(f"this benchmark needs a CUDA device; torch {torch.__version__} sees none on this machine")
    return torch.cuda.get_device_name()


def result(bench: str, rows: list[dict[str, Any]], ceilings: dict[str, float], gpu: str) -> dict[str, Any]:
    """The whole content of a result file, with today's versions."""
    packages = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    packages |= {p: v for p in PACKAGES if (v := version(p)) is not None}
    return {
        "bench": bench,
        "date": now(),
        "commit": commit(),
        "gpu": gpu,
        "driver": driver(),
        "torch": torch.__version__,
        "triton": version("triton") or "none",
        "packages": packages,
        "ceilings": ceilings,
        "rows": rows,
    }


def finding(bench: str, gpu: str) -> dict[str, Any]:
    """What a file that is no table of rows begins with."""
    return {"bench": bench, "date": now(), "commit": commit(), "gpu": gpu, "torch": torch.__version__}


def write_finding(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write(content: dict[str, Any], out: str | Path | None = None) -> Path:
    """Writes a result file, one row a line, to ``out`` or bench/results/<gpu>/<bench>.json; returns the
    path."""
    check(content)
    path = Path(out) if out else RESULTS / gpu_slug(content["gpu"]) / f"{content['bench']}.json"
    head = json.dumps({k: v for k, v in content.items() if k != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(r) for r in content["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
    # In one step: a run that is killed while it writes leaves the file that it wrote before.
    half = path.with_name(f"{path.name}.part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
    return path


def check(content: dict[str, Any]) -> None:
    """Raises BenchError unless ``content`` has the keys of a result file and of its rows, no more and no
    less."""
    if set(content) != set(FILE_KEYS):
        raise BenchError(f"a result has the keys {', '.join(FILE_KEYS)}; these differ: {set(content) ^ set(FILE_KEYS)}")
    if not content["rows"]:
        raise BenchError("a result needs at least one row")
    for r in content["rows"]:
        if set(r) != set(ROW_KEYS):
            raise BenchError(f"a row has the keys {', '.join(ROW_KEYS)}; these differ: {set(r) ^ set(ROW_KEYS)}")
        if not r["low"] <= r["median"] <= r["high"]:
            raise BenchError(f"low <= median <= high does not hold in {r}")


def load(path: str | Path) -> dict[str, Any]:
    """Reads and checks a result file."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    check(content)
    return content


# ----------------------------------------------------------------------------------------------- timing


# What a turn of a kernel time profiles: calls that fill LEAD_US again after the profiler's start, when the device
# idles, then those that count, PROFILED_US of them within these bounds. Of calls above LONG_US two will do.
LEAD_US, LEAD_CALLS = 25_000.0, 64
PROFILED_US, PROFILED_CALLS = 8_000.0, (4, 24)
LONG_US, LONG_CALLS = 20_000.0, 2


def kernel_us(variants: dict[str, Call], sets: int, rounds: int = 3) -> dict[str, list[float]]:
    """Summed device time of the kernels of a call, from the profiler, in microseconds; gaps between them do not count.

    The calls of all variants follow each other in an order that rotates, so that they share the clock that the card
    holds under their common load. A round first runs them unprofiled for 50 ms of device work (timing.SETTLE_US), then
    again under the profiler for 25 ms that are thrown away, and only then counts 4 to 24 calls of each (2 where all of
    them together take more than 20 ms).
    """
    names = list(variants)
    about = {name: max(1.0, look_us(call)) for name, call in variants.items()}
    total = sum(about.values())
    size = {name: len(_kernels_of(lambda call=call: call(0))) for name, call in variants.items()}
    lead, counted = profiled_calls(total)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        orders = list(turns(names, lead + counted))

        def all_calls(orders: list[list[str]] = orders) -> None:
            for i, order in enumerate(orders):
                for name in order:
                    variants[name](i % sets)

        settle(lambda i: [call(i) for call in variants.values()], sets, total)
        kernels = _kernels_of(all_calls)
        if len(kernels) != (lead + counted) * sum(size.values()):
            raise BenchError(f"{len(kernels)} kernels in {lead + counted} turns of {size}: the calls are not alike")
        left = iter(kernels)
        for i, order in enumerate(orders):
            for name in order:
                took = sum(next(left) for _ in range(size[name]))
                if i >= lead:
                    times[name].append(took)
    return times


def _kernels_of(fn: Any) -> list[float]:
    """Device time of each kernel that a function launches, in order, in microseconds."""
    return [e.duration_us for e in capture_events(fn) if e.kind == "kernel"]


def kernel_alone_us(variants: dict[str, Call], sets: int, rounds: int = 3) -> dict[str, list[float]]:
    """As :func:`kernel_us`, of a variant that runs alone: at the clock that the card holds under its own load.

    Where the card is limited by its power, what draws less runs at a higher clock. Each turn of a variant first runs it
    unprofiled for 50 ms of device work, then again under the profiler for 25 ms that are thrown away, and only then
    counts 4 to 24 calls (2 of those above 20 ms). About 0.1 s a turn; turns rotate.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    about = {name: max(1.0, look_us(call)) for name, call in variants.items()}
    for order in turns(list(variants), rounds):
        for name in order:
            settle(variants[name], sets, about[name])
            times[name] += _kernel_times(variants[name], sets, about[name])
    return times


def profiled_calls(us: float) -> tuple[int, int]:
    """Calls of about ``us`` that a turn profiles: those thrown away, and those that count."""
    lead = max(1, min(LEAD_CALLS, math.ceil(LEAD_US / us)))
    least, most = PROFILED_CALLS
    return lead, LONG_CALLS if us > LONG_US else max(least, min(most, math.ceil(PROFILED_US / us)))


def _kernel_times(call: Call, sets: int, us: float) -> list[float]:
    lead, counted = profiled_calls(us)

    def all_calls() -> None:
        for i in range(lead + counted):
            call(i % sets)

    kernels = _kernels_of(all_calls)
    if len(kernels) % (lead + counted):
        raise BenchError(f"{len(kernels)} kernels in {lead + counted} calls: the calls are not alike")
    size = len(kernels) // (lead + counted)
    return [sum(kernels[i : i + size]) for i in range(lead * size, len(kernels), size)]


def wall_us(variants: dict[str, Call], sets: int, rounds: int = 40, calls: int = 10) -> dict[str, list[float]]:
    """Wall-clock time of a call, in microseconds: blocks of ``calls`` in a row that start and end with an idle device.

    A block is what a loop over batches does; its variants take turns.
    """
    return _blocks_us(variants, sets, rounds, calls, wait=True)


def host_us(variants: dict[str, Call], sets: int, rounds: int = 60, calls: int = 20) -> dict[str, list[float]]:
    """Time that the host takes to issue a call, in microseconds: blocks of ``calls`` in a row that start with an idle
    device and do not wait for it.

    A block must be short: where the device's queue of launches (about a thousand) is full, issuing is waiting.
    """
    return _blocks_us(variants, sets, rounds, calls, wait=False)


def _blocks_us(variants: dict[str, Call], sets: int, rounds: int, calls: int, wait: bool) -> dict[str, list[float]]:
    """Time of a call in blocks that start with an idle device; ``wait``: until it is idle again."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i, order in enumerate(turns(list(variants), rounds)):
        for name in order:
            call = variants[name]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for j in range(i, i + calls):
                call(j % sets)
            if wait:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return times


def peak_bytes(call: Call, repeats: int = 3) -> list[float]:
    """Most memory that a call holds above what was allocated before it, in bytes."""
    values = []
    for _ in range(repeats):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(0)
        torch.cuda.synchronize()
        values.append(float(torch.cuda.max_memory_allocated() - before))
    return values


def saved_bytes(forward: Call, repeats: int = 3) -> list[float]:
    """Memory that a forward keeps for its backward, in bytes: what it leaves allocated, but for its output.

    The input and the weights were there before and do not count.
    """
    values = []
    for _ in range(repeats):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward(0)
        torch.cuda.synchronize()
        values.append(float(torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()))
        del y
    return values


def kernels(call: Call) -> list[float]:
    """Device kernels of one steady call."""
    return [float(count_launches(lambda: call(0)).kernels)]


def ceilings(repeats: int = 20) -> dict[str, float]:
    """What this card reaches today: a copy (bytes read and written), a read, and an 8192 cubed bfloat16
    product."""
    source = torch.randn(2**29, device="cuda")  # 2 GiB
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    work = {
        "copy_tb_s": (lambda: target.copy_(source), 2 * source.nbytes / 1e12),
        "read_tb_s": (lambda: source.sum(), source.nbytes / 1e12),
        "gemm_tflop_s": (lambda: a @ b, 2 * 8192**3 / 1e12),
    }
    found = {}
    for name, (fn, amount) in work.items():
        events_us(fn, 3)
        found[name] = round(amount / (statistics.median(events_us(fn, repeats)) * 1e-6), 3)
    return found
