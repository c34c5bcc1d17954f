"""What HolisticTraceAnalysis says of the shipped traces, for the tests to hold ours against.

    pip install 'fusedmlp[hta]'
    python -O bench/hta_numbers.py         # writes tests/traces/hta.json

-O, since it asserts of a difference of rounded numbers that it is not negative.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

TRACES = Path(__file__).resolve().parents[1] / "tests" / "traces"

# It rounds every time down to microseconds otherwise.
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"


def _copy(path: Path, folder: str) -> Path:
    """A copy without the "stream" that Inductor notes at its operations on the host: HTA takes whatever has one for
    work of the device, and would count these kernels twice."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    for event in content["traceEvents"]:
        if event.get("cat") == "cpu_op":
            event["args"].pop("stream", None)
    copied = Path(folder, path.name)
    with gzip.open(copied, "wt", encoding="utf-8") as file:
        json.dump(content, file)
    return copied


def numbers(path: Path) -> dict[str, float]:
    """Of one trace; times in microseconds.

    busy_us: with at least one kernel running. idle_us, span_us: between the first and the last work of the device,
    copies and memsets included. launches, launch_call_us, launch_delay_us, launched_us: of cudaLaunchKernel and
    cudaLaunchKernelExC alone, which is what it knows: how many, and the sums of the calls' time, of the time from call
    to start, and of the kernels' time.
    """
    from hta.trace_analysis import TraceAnalysis

    with tempfile.TemporaryDirectory() as folder:
        analysis = TraceAnalysis({0: str(_copy(path, folder))}, trace_dir=folder, include_last_profiler_step=True)
        whole = analysis.get_temporal_breakdown(visualize=False).iloc[0]
        stats: Any = analysis.get_cuda_kernel_launch_stats(ranks=[0], include_memory_events=False, visualize=False)[0]
        frame = analysis.t.get_trace(0)
        symbols = analysis.t.symbol_table.get_sym_table()
        work = [symbols[i] for i in frame[frame["stream"].ne(-1)]["name"]]
    return {
        "kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in work),
        "busy_us": float(whole["compute_time(us)"]),
        "idle_us": float(whole["idle_time(us)"]),
        "span_us": float(whole["kernel_time(us)"]),
        "launches": len(stats),
        "launch_call_us": float(stats["cpu_duration"].sum()),
        "launch_delay_us": float(stats["launch_delay"].sum()),
        "launched_us": float(stats["gpu_duration"].sum()),
    }


def main() -> int:
    if __debug__:
        print("run it with python -O, see the top of the file", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {path.name: numbers(path) for path in sorted(TRACES.glob("*.json.gz"))}
    content = {"version": metadata.version("HolisticTraceAnalysis"), "traces": found}
    (TRACES / "hta.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} traces")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
