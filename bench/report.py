"""Markdown tables from a result file.

python bench/report.py bench/results/h200/first.json
python bench/report.py --readme README.md --metrics kernel_us wall_us kernels    between the README's two markers
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
UNITS = {"kernel_us": "kernel time, us", "graph_us": "CUDA graph replay, us", "wall_us": "wall clock, us"}
UNITS |= {
    "host_us": "host time, us",
    "kernels": "device kernels",
    "rel_error": "relative error against float64",
}
UNITS |= {"peak_bytes": "peak memory of a call, MiB", "saved_bytes": "memory kept for backward, MiB"}
ORDER = ("kernel_us", "graph_us", "wall_us", "host_us", "kernels", "peak_bytes", "saved_bytes", "rel_error")


def _number(metric: str, value: float) -> str:
    if metric == "rel_error":
        return f"{value:.2e}"
    if metric.endswith("_bytes"):
        return f"{value / 2**20:.1f}"
    return f"{value:.0f}" if metric == "kernels" or value >= 1000 else f"{value:.1f}"


def _table(rows: list[dict[str, Any]], metric: str) -> list[str]:
    """One Markdown table: shapes and passes down, variants across, then every other variant over fused."""
    rows = [r for r in rows if r["metric"] == metric]
    variants = list(dict.fromkeys(r["variant"] for r in rows))
    others = [v for v in variants if v != "fused"] if "fused" in variants else []
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for r in rows:
        biased = ", bias" if r["bias"] else ""
        what = f"{r['op']} {r['pass']}{biased}, {r['dtype']}"
        shape = f"[{r['tokens']}, {r['hidden']} -> {r['intermediate']}]"
        cells.setdefault((what, shape), {})[r["variant"]] = r["median"]
    head = [UNITS[metric], "shape", *variants, *(f"{v} / fused" for v in others)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 2 + " ---: |" * (len(head) - 2)]
    for (what, shape), by_variant in cells.items():
        line = [what, shape, *(_number(metric, by_variant[v]) if v in by_variant else "" for v in variants)]
        fused = by_variant.get("fused")
        for other in others:
            line.append(f"{by_variant[other] / fused:.2f}" if fused and other in by_variant else "")
        lines.append("| " + " | ".join(line) + " |")
    return lines


def markdown(content: dict[str, Any], metrics: Sequence[str] | None = None) -> str:
    """The result as Markdown: a line about the run, then a table for each metric that it holds."""
    present = [m for m in ORDER if any(r["metric"] == m for r in content["rows"])]
    chosen = [m for m in metrics if m in present] if metrics else present
    if not chosen:
        raise common.BenchError(f"this result has {', '.join(present)}, and none of {', '.join(metrics or ())}")
    c = content["ceilings"]
    lines = [
        f"{content['gpu']}, driver {content['driver']}, torch {content['torch']}, triton "
        f"{content['triton']}, "
        f"{content['date'][:10]}, commit {content['commit'][:12]}; medians. The card that day: copy "
        f"{c['copy_tb_s']:.2f} TB/s, read {c['read_tb_s']:.2f} TB/s, bfloat16 product "
        f"{c['gemm_tflop_s']:.0f} TFLOP/s."
    ]
    for metric in chosen:
        lines += ["", *_table(content["rows"], metric)]
    return "\n".join(lines) + "\n"


def put(text: str, readme: Path) -> None:
    """Write a report between the markers of a Markdown file."""
    content = readme.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise common.BenchError(f"{readme} needs the markers {BEGIN} and {END}")
    readme.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = common.RESULTS / "h200" / "first.json"
    parser.add_argument("file", nargs="?", default=str(default), help="result file (default: %(default)s)")
    parser.add_argument("--metrics", nargs="+", choices=ORDER, help="only these tables")
    parser.add_argument("--readme", metavar="FILE", help="write between the markers of this file instead of printing")
    args = parser.parse_args(argv)
    try:
        text = markdown(common.load(args.file), args.metrics)
        if args.readme:
            put(text, Path(args.readme))
        else:
            print(text, end="")
    except (OSError, ValueError, common.BenchError) as error:
        print(f"bench/report.py: {args.file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
