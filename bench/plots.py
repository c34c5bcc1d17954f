"""Plots of a result file: speed-ups against tokens, and shares of the card's ceiling. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import common

MATRICES = {"geglu": 3, "swiglu": 3, "mlp_relu": 2}  # weight matrices of hidden x intermediate
PRODUCTS = {"forward": 1, "backward": 2, "step": 3}  # matrix products with each of them in a pass
BASES = ("eager", "compile")
NAMES = {"kernel_us": "kernel time", "graph_us": "CUDA graph replay", "wall_us": "wall clock"}


def time_metric(rows: list[dict[str, Any]], metric: str | None = None) -> str:
    """The metric asked for, or the first time that the result has."""
    present = [m for m in common.TIMES if any(r["metric"] == m for r in rows)]
    if metric is not None and metric not in present:
        raise common.BenchError(f"plots need a time that the result has ({', '.join(present)}), not {metric}")
    if not present:
        raise common.BenchError(f"plots need one of {', '.join(common.TIMES)}, and this result has none")
    return metric or present[0]


def by_cell(rows: list[dict[str, Any]], metric: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """(op, pass, tokens, hidden, intermediate, dtype, bias) -> variant -> median."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        if r["metric"] == metric:
            key = tuple(r[k] for k in common.ROW_KEYS[:7])
            cells.setdefault(key, {})[r["variant"]] = r["median"]
    return cells


def speedups(rows: list[dict[str, Any]], pass_: str, base: str, metric: str) -> dict[str, list[tuple[int, float]]]:
    """Label of a width -> (tokens, time of ``base`` over time of fused), in the order of the tokens."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (op, p, tokens, hidden, intermediate, *_), times in by_cell(rows, metric).items():
        if p == pass_ and base in times and "fused" in times:
            label = f"{op} {hidden} -> {intermediate}"
            lines.setdefault(label, []).append((tokens, times[base] / times["fused"]))
    return {label: sorted(points) for label, points in lines.items()}


def shares(rows: list[dict[str, Any]], pass_: str, metric: str, gemm_tflop_s: float) -> dict[str, dict[str, float]]:
    """Label of a cell -> variant -> rate of the operation's matrix products over that of the card's own product."""
    found: dict[str, dict[str, float]] = {}
    for (op, p, tokens, hidden, intermediate, *_), times in by_cell(rows, metric).items():
        if p == pass_ and op in MATRICES:
            flop = 2 * MATRICES[op] * PRODUCTS[p] * tokens * hidden * intermediate
            label = f"{op}\n{tokens}\n{hidden}->{intermediate}"
            found[label] = {v: flop / (us * 1e-6) / (gemm_tflop_s * 1e12) for v, us in times.items()}
    return found


def draw(content: dict[str, Any], folder: str | Path, metric: str | None = None) -> list[Path]:
    """Writes speedup-<pass>.png and ceiling-<pass>.png of each pass in the result; returns their paths."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise common.BenchError(f"plots need matplotlib: {error}") from error
    rows = content["rows"]
    metric = time_metric(rows, metric)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    note = f"{content['gpu']}, torch {content['torch']}, {content['date'][:10]}, {NAMES[metric]}"
    written = []

    def save(figure: Any, name: str, title: str) -> None:
        figure.suptitle(f"{title}\n{note}", fontsize=10)
        written.append(folder / name)
        figure.savefig(written[-1], dpi=120)

    for pass_ in common.PASSES:
        lines = {base: speedups(rows, pass_, base, metric) for base in BASES}
        if any(lines.values()):
            figure = Figure(figsize=(11, 4.5), layout="constrained")
            FigureCanvasAgg(figure)
            for axes, base in zip(figure.subplots(1, len(BASES), sharey=True), BASES, strict=True):
                for label, points in lines[base].items():
                    axes.plot([t for t, _ in points], [s for _, s in points], marker="o", label=label)
                axes.axhline(1.0, color="black", linewidth=0.8)
                axes.set(xlabel="tokens", ylabel="speed-up of fused", title=f"over {base}")
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                if lines[base]:
                    axes.legend(fontsize=8)
            save(figure, f"speedup-{pass_}.png", f"Speed-up, {pass_}")
        cells = shares(rows, pass_, metric, content["ceilings"]["gemm_tflop_s"])
        if cells:
            variants = list(dict.fromkeys(v for by_variant in cells.values() for v in by_variant))
            figure = Figure(figsize=(max(7.0, 1.4 * len(cells) + 2), 4.8), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            width = 0.8 / len(variants)
            for k, v in enumerate(variants):
                there = [(i, by_variant[v]) for i, by_variant in enumerate(cells.values()) if v in by_variant]
                axes.bar([i + (k + 0.5) * width - 0.4 for i, _ in there], [s for _, s in there], width, label=v)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(cells)), list(cells), fontsize=8)
            axes.set_ylabel("share of the card's bfloat16 product")
            axes.legend(fontsize=8)
            save(figure, f"ceiling-{pass_}.png", f"Matrix products' rate, {pass_}")
    return written
