"""Fill the tables of docs/profiling.md from the shipped traces and from bench/results/h200/profile/pitfalls.json.

python bench/profiling_tables.py            # writes the file
python bench/profiling_tables.py --check    # exit code 1 where it would change
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace.model import busy_us
from fusedmlp.profiling.trace_report import TraceReport

ROOT = Path(__file__).resolve().parents[1]
DOCS, TRACES = ROOT / "docs" / "profiling.md", ROOT / "tests" / "traces"
PITFALLS = ROOT / "bench" / "results" / "h200" / "profile" / "pitfalls.json"
# What gpu-idle 0.1.0 prints for them.
GPU_IDLE = {
    "geglu-eager-step": (27, "none of its signatures"),
    "geglu-fused-forward": (59, "none of its signatures"),
    "naive-eager-step": (4, "launch overhead"),
    "model-vit-step": (25, "launch overhead"),
    "model-resnet-step": (46, "none of its signatures"),
}


@cache
def _report(name: str) -> TraceReport:
    return TraceReport(load(TRACES / f"h200-{name}.json.gz"))


def journey(workload: str) -> list[str]:
    """A table of a workload: for each variant and pass kernels, kernel time, and the device's waiting."""
    lines = ["| variant | pass | kernels | kernel time, us | device waits for the host, us | what runs |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- |")
    for pass_ in ("forward", "step"):
        for variant in ("eager", "compile", "fused"):
            if not (TRACES / f"h200-{workload}-{variant}-{pass_}.json.gz").exists():
                continue
            report = _report(f"{workload}-{variant}-{pass_}")
            step = report.stats.steps[report.step]
            kinds = _kinds(report)
            numbers = f"{step.kernels} | {step.kernel_us:.1f} | {step.waiting_us:.0f}"
            lines.append(f"| {variant} | {pass_} | {numbers} | {kinds} |")
    return lines


def _kinds(report: TraceReport) -> str:
    """The kernels of a step by kind: "3 x product (cuBLAS), 1 x elementwise (Inductor)"."""
    decoded = {k.name: k.decoded for k in report.stats.kernels}
    found: dict[str, int] = {}
    for w in report.work:
        if w.kind == "kernel":
            kind = f"{decoded[w.name].family} ({decoded[w.name].library})".replace("gemm", "product")
            found[kind] = found.get(kind, 0) + 1
    return ", ".join(f"{n} x {kind}" for kind, n in found.items())


def gpu_idle() -> list[str]:
    lines = ["| trace | gpu-idle: busy | from explain's kernels | gpu-idle: advice | explain: verdict |"]
    lines.append("| --- | ---: | ---: | --- | --- |")
    for name, (busy, advice) in GPU_IDLE.items():
        report = _report(name)
        trace = report.trace
        window = trace.steps[-1].end - trace.steps[0].start
        share = 100 * busy_us(trace.kernels) / window
        lines.append(f"| {name} | {busy} % | {share:.0f} % | {advice} | {report.verdict.word} |")
    return lines


def pitfalls() -> list[str]:
    if not PITFALLS.exists():
        return []
    content = json.loads(PITFALLS.read_text(encoding="utf-8"))
    p: dict[str, Any] = content["pitfalls"]
    graphs, MiB = p["dynamic_shapes"]["graphs_for_5_lengths"], p["retained_graph"]["MiB"]
    casts, clock, first = p["casts_and_fills"], p["no_synchronise"], p["first_call"]
    broken, thread = p["graph_break"], p["backward_thread"]
    return [
        f"What each costs, for GeGLU 768 -> 3072 on an {content['gpu'].removeprefix('NVIDIA ')} (`bench/pitfalls.py`, "
        f"torch {content['torch']}):",
        "",
        "| pitfall | shown by | |",
        "| --- | --- | --- |",
        f"| no synchronise | a forward of 8192 tokens, by the clock | {clock['us_without']:.0f} us without, "
        f"{clock['us_with']:.0f} us with |",
        f"| first call | of the compiled layer | {first['first_ms']:.0f} ms, later ones {first['later_ms']:.2f} ms |",
        f"| `fullgraph=False` | kernels of a forward | {broken['whole']} whole, {broken['broken']} with a break |",
        f"| dynamic shapes | graphs compiled for five lengths | {graphs['static']} with `dynamic=False`, "
        f"{graphs['default']} by default, {graphs['dynamic']} with `dynamic=True` |",
        f"| casts | kernels of a forward | {casts['forward']}, {casts['forward_autocast']} under autocast |",
        f"| zero-fills | kernels and memsets of a step | {casts['step_none']} with gradients None, "
        f"{casts['step_zeroed']} and {casts['step_zeroed_memset']} with zeroed ones |",
        f"| retained graph | memory after the backward | {MiB['freed']:.0f} MiB, {MiB['retained']:.0f} MiB retained |",
        f"| backward's thread | a step of 128 tokens | {thread['us_own_thread']:.0f} us, "
        f"{thread['us_calling_thread']:.0f} us by the calling thread |",
    ]


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "linear": lambda: journey("linear"),
    "geglu": lambda: journey("geglu"),
    "naive": lambda: journey("naive"),
    "gpu-idle": gpu_idle,
    "pitfalls": pitfalls,
}


def filled(text: str) -> str:
    """The document with every table made anew."""
    for name, make in SECTIONS.items():
        text = _replaced(text, name, "".join(line + "\n" for line in make()))
    return text


def _replaced(text: str, name: str, body: str) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{DOCS}: no place for the table {name}")
    return head + begin + body + end + tail


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = DOCS.read_text(encoding="utf-8")
    new = filled(old)
    if args.check:
        return int(old != new)
    DOCS.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
