"""Markdown tables and plots from a result file.

python bench/report.py bench/results/h200/first.json
python bench/report.py --readme README.md --metrics kernel_us wall_us kernels    between the README's two markers
python bench/report.py bench/results/h200/peers.json --ratios           ours over eager and compile, with their means
python bench/report.py bench/results/h200/peers.json --plots plots      PNG files: speed-ups, shares of the ceiling
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common, plots

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
    lines = [_run(content)]
    for metric in chosen:
        lines += ["", *_table(content["rows"], metric)]
    return "\n".join(lines) + "\n"


def _run(content: dict[str, Any]) -> str:
    """A line about the run."""
    c = content["ceilings"]
    return (
        f"{content['gpu']}, driver {content['driver']}, torch {content['torch']}, triton {content['triton']}, "
        f"{content['date'][:10]}, commit {content['commit'][:12]}; medians. The card that day: copy "
        f"{c['copy_tb_s']:.2f} TB/s, read {c['read_tb_s']:.2f} TB/s, bfloat16 product "
        f"{c['gemm_tflop_s']:.0f} TFLOP/s."
    )


def _ratios(rows: list[dict[str, Any]], metric: str) -> list[str]:
    """One Markdown table: what fused takes over what the others take, their geometric means and worst cells."""
    columns: dict[str, list[tuple[float, str]]] = {base: [] for base in plots.BASES}
    head = [UNITS[metric], "shape", *(f"fused / {base}" for base in plots.BASES)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 2 + " ---: |" * len(plots.BASES)]
    for (op, pass_, tokens, hidden, inter, dtype, bias), by_variant in plots.by_cell(rows, metric).items():
        what, shape = f"{op} {pass_}{', bias' if bias else ''}, {dtype}", f"[{tokens}, {hidden} -> {inter}]"
        line = [what, shape]
        for base, column in columns.items():
            if by_variant.get(base) and by_variant.get("fused"):  # nothing to divide where one is zero
                column.append((by_variant["fused"] / by_variant[base], f"{what}, {shape}"))
                line.append(f"{column[-1][0]:.3f}")
            else:
                line.append("")
        lines.append("| " + " | ".join(line) + " |")
    means = [f"{statistics.geometric_mean(r for r, _ in c):.3f}" if c else "" for c in columns.values()]
    lines.append("| " + " | ".join(["geometric mean", "", *means]) + " |")
    for base, column in columns.items():
        if column:
            ratio, where = max(column)
            lines += ["", f"Worst against {base}: {ratio:.3f} ({where})."]
    return lines


def ratios(content: dict[str, Any], metrics: Sequence[str] | None = None) -> str:
    """fused over eager and over compile as Markdown, below 1 where fused takes less; times where not said otherwise."""
    has_both = {r["metric"] for r in content["rows"] if r["variant"] == "fused"}
    has_both &= {r["metric"] for r in content["rows"] if r["variant"] in plots.BASES}
    chosen = [m for m in metrics or common.TIMES if m in has_both]
    if not chosen:
        raise common.BenchError(f"no {' or '.join(metrics or common.TIMES)} of fused and of a variant to compare with")
    lines = [_run(content)]
    for metric in chosen:
        lines += ["", *_ratios(content["rows"], metric)]
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
    parser.add_argument("--ratios", action="store_true", help="fused over eager and compile, instead of all variants")
    parser.add_argument("--plots", metavar="DIR", help="draw into this folder instead, by the first time of --metrics")
    args = parser.parse_args(argv)
    try:
        content = common.load(args.file)
        if args.plots:
            times = [m for m in args.metrics or () if m in common.TIMES]
            for path in plots.draw(content, args.plots, times[0] if times else None):
                print(path)
            return 0
        text = (ratios if args.ratios else markdown)(content, args.metrics)
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
