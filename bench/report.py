"""Markdown tables and plots from a result file.

python bench/report.py bench/results/h200/first.json
python bench/report.py --readme README.md --metrics kernel_us wall_us kernels    between the README's two markers
python bench/report.py bench/results/h200/peers.json --ratios           ours over eager and compile, with their means
python bench/report.py bench/results/h200/peers.json --plots plots      PNG files: speed-ups, shares of the ceiling
python bench/report.py bench/results/h200/grid.json --grid              mean speed-ups, worst cells, all that is lost
python bench/report.py --heuristic                                      heuristic against table, from the sweeps

Several files make one text with a heading each; of a grid it is what --grid prints, and several grids are one, of each
cell its latest run. With --readme, --plots FOLDER draws the grids as SVG files there and shows them in the text:

python bench/report.py bench/results/h200/{peers,grid*}.json --readme README.md --plots bench/results/h200/plots
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common, heuristic, plots, summary

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
UNITS = {
    "kernel_us": "kernel time, us",
    "kernel_alone_us": "kernel time, each alone, us",
    "graph_us": "CUDA graph replay, us",
    "wall_us": "wall clock, us",
    "host_us": "host time, us",
    "kernels": "device kernels",
    "rel_error": "relative error against float64",
}
UNITS |= {"peak_bytes": "peak memory of a call, MiB", "saved_bytes": "memory kept for backward, MiB"}
ORDER = common.METRICS


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


TITLES = {"grid": "Over the grid", "peers": "Against the peers", "first": "Against eager and torch.compile"}
TITLES["quack"] = "Against quack"  # a run of peers that has it
SHOWN = ("speedup",)  # of the plots of a grid, in a README


def section(content: dict[str, Any], args: argparse.Namespace) -> str:
    """One file as Markdown."""
    if args.grid or content["bench"] == "grid":
        runs = content.get("runs", [content])
        return "\n\n".join([*map(_run, runs), GRID_NOTE, summary.markdown(content)]) + "\n"
    return (ratios if args.ratios else markdown)(content, args.metrics)


GRID_NOTE = (
    "Speed-ups are time of the other over time of fused, for a forward without gradients and a training step: calls "
    f"within CUDA graphs up to {common.GRAPHS_UP_TO} tokens, kernel time above."
)


def pictures(content: dict[str, Any], folder: Path, readme: Path) -> str:
    """Draws a grid as SVG files; returns the Markdown that shows them, with paths that GitHub finds."""
    base = readme.resolve().parent
    if not folder.resolve().is_relative_to(base):
        raise common.BenchError(f"{readme} can show plots in its own folder {base} or below, not in {folder}")
    paths = plots.draw(content, folder, suffix="svg")
    shown = [path for path in paths if path.name.startswith(SHOWN)]
    return "\n".join(f"![{path.stem}]({path.resolve().relative_to(base).as_posix()})" for path in shown) + "\n"


def one_grid(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The contents, with all grids as one (:func:`summary.union`) in the place of the first."""
    grids = [content for content in contents if content["bench"] == "grid"]
    if len(grids) < 2:
        return list(contents)
    joined = summary.union(grids)
    return [joined if c is grids[0] else c for c in contents if c is grids[0] or c["bench"] != "grid"]


def title(content: dict[str, Any]) -> str:
    has_quack = any(row["variant"].startswith("quack") for row in content["rows"])
    kind = "quack" if has_quack else content["bench"]
    return TITLES.get(kind, kind)


def text_of(contents: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    parts = []
    for content in contents:
        heading = f"### {title(content)}\n\n" if len(contents) > 1 else ""
        parts.append(heading + section(content, args))
        if args.plots and content["bench"] == "grid":
            parts.append(pictures(content, Path(args.plots), Path(args.readme)))
    return "\n".join(parts)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = common.RESULTS / "h200" / "first.json"
    made.add_argument("files", nargs="*", default=[str(default)], help=f"result files (default: {default})")
    made.add_argument("--metrics", nargs="+", choices=ORDER, help="only these tables")
    made.add_argument("--readme", metavar="FILE", help="write between the markers of this file instead of printing")
    made.add_argument("--ratios", action="store_true", help="fused over eager and compile, instead of all variants")
    made.add_argument("--grid", action="store_true", help="the summary of a grid, also of another benchmark's times")
    made.add_argument("--heuristic", action="store_true", help="heuristic against table, of sweeps (default: h200's)")
    made.add_argument("--plots", metavar="DIR", help="draw into this folder instead, by the first time of --metrics")
    made.add_argument("--format", choices=plots.FORMATS, default="png", help="of the plots (default: %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.heuristic:
            given = [Path(f) for f in args.files if Path(f).name.startswith("sweep")]
            print(heuristic.distances(given or sorted((common.RESULTS / "h200").glob("sweep*.json"))))
            return 0
        contents = one_grid([common.load(path) for path in args.files])
        if args.plots and not args.readme:
            times = [m for m in args.metrics or () if m in common.TIMES]
            for content in contents:
                for path in plots.draw(content, args.plots, times[0] if times else None, args.format):
                    print(path)
            return 0
        text = text_of(contents, args)
        if args.readme:
            put(text, Path(args.readme))
        else:
            print(text, end="")
    except (OSError, ValueError, common.BenchError) as error:
        print(f"bench/report.py: {', '.join(args.files)}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
