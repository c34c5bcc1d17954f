"""Time and memory of ``explain`` on a large trace: a shipped one, repeated step after step.

python bench/large_trace.py --mb 200
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "traces" / "h200-model-llama-step.json.gz"
_IDS = ("correlation", "External id", "Ev Idx", "Sequence number")


def write_large(target: Path, megabytes: int, source: Path = SOURCE) -> int:
    """Write the events of a trace of one step again and again, each time later and with other ids, until the file has
    so many MB. Returns the number of steps."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = [e for e in content["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "Trace"]
    first = min(e["ts"] for e in events)
    length = max(e["ts"] + e.get("dur", 0) for e in events) - first + 100
    blocks = [_template(e, first) for e in events]
    steps = 0
    with target.open("w", encoding="utf-8") as out:
        head = {k: v for k, v in content.items() if k not in ("traceEvents", "traceName")}
        out.write(json.dumps(head)[:-1] + ',\n"traceEvents": [\n')
        while out.tell() < megabytes * 1e6:
            ends = ",\n" if steps else ""
            out.write(ends + ",\n".join(_filled(parts, steps, length) for parts in blocks))
            steps += 1
        out.write("\n]}\n")
    return steps


def _template(event: dict[str, Any], first: float) -> tuple[str, float, dict[str, int]]:
    """The event as text in the profiler's own spacing, with marks for what changes; its time; its ids."""
    args = dict(event.get("args", {}))
    ids = {key: args[key] for key in _IDS if key in args}
    at = event["ts"] - first
    event = event | {"ts": "@ts", "args": args | {key: f"@{key}" for key in ids}}
    if event["name"].startswith("ProfilerStep"):
        event["name"] = "ProfilerStep#@step"
    return json.dumps(event, indent=2), at, ids


def _filled(parts: tuple[str, float, dict[str, int]], step: int, length: float) -> str:
    text, at, ids = parts
    text = text.replace('"@ts"', f"{at + step * length:.3f}").replace("@step", str(step))
    for key, value in ids.items():
        text = text.replace(f'"@{key}"', str(value + step * 1_000_000))
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.json")
        steps = write_large(path, args.mb)
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "fusedmlp", "explain", str(path)], cwd=ROOT, capture_output=True)
        seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{args.mb} MB, {steps} steps: {seconds:.1f} s, at most {peak:.0f} MB, exit code {done.returncode}")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
