"""Plots of a result file: speed-ups against tokens, and shares of the card's ceiling. Needs matplotlib.

A result with many shapes (the grid) gets a figure for each operation, with a line for each width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import common

MATRICES = {"geglu": 3, "swiglu": 3, "mlp_relu": 2}  # weight matrices of hidden x intermediate
PRODUCTS = {"forward": 1, "backward": 2, "step": 3}  # matrix products with each of them in a pass
BASES = ("eager", "compile")
NAMES = {
    "kernel_us": "kernel time",
    "kernel_alone_us": "kernel time, each alone",
    "graph_us": "CUDA graph replay",
    "wall_us": "wall clock",
}
GRID = ("graph_us", "kernel_us")  # of the grid: each cell has one of them, by its tokens
BARS = 12  # shapes of a pass that fit beside each other; more become lines
FORMATS = ("png", "svg")
Metric = str | Sequence[str]


def time_metric(content: dict[str, Any], metric: str | None = None) -> Metric:
    """The metric asked for, or the first time that the result has; of the grid all that it has."""
    rows = content["rows"]
    present = [m for m in common.TIMES if any(r["metric"] == m for r in rows)]
    if metric is not None and metric not in present:
        raise common.BenchError(f"plots need a time that the result has ({', '.join(present)}), not {metric}")
    if not present:
        raise common.BenchError(f"plots need one of {', '.join(common.TIMES)}, and this result has none")
    return metric or (GRID if content["bench"] == "grid" else present[0])


def by_cell(rows: list[dict[str, Any]], metric: Metric) -> dict[tuple[Any, ...], dict[str, float]]:
    """(op, pass, tokens, hidden, intermediate, dtype, bias) -> variant -> median."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    metrics = (metric,) if isinstance(metric, str) else metric
    for r in rows:
        if r["metric"] in metrics:
            key = tuple(r[k] for k in common.ROW_KEYS[:7])
            cells.setdefault(key, {})[r["variant"]] = r["median"]
    return cells


def speedups(rows: list[dict[str, Any]], pass_: str, base: str, metric: Metric) -> dict[str, list[tuple[int, float]]]:
    """Label of a width -> (tokens, time of ``base`` over time of fused), in the order of the tokens."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (op, p, tokens, hidden, intermediate, *_), times in by_cell(rows, metric).items():
        if p == pass_ and base in times and "fused" in times:
            label = f"{op} {hidden} -> {intermediate}"
            lines.setdefault(label, []).append((tokens, times[base] / times["fused"]))
    return {label: sorted(points) for label, points in lines.items()}


def shares(rows: list[dict[str, Any]], pass_: str, metric: Metric, gemm_tflop_s: float) -> dict[str, dict[str, float]]:
    """Label of a cell -> variant -> rate of the operation's matrix products over that of the card's own product."""
    found: dict[str, dict[str, float]] = {}
    for (op, p, tokens, hidden, intermediate, *_), times in by_cell(rows, metric).items():
        if p == pass_ and op in MATRICES:
            label = f"{op}\n{tokens}\n{hidden}->{intermediate}"
            found[label] = {
                v: share(op, p, tokens * hidden * intermediate, us, gemm_tflop_s) for v, us in times.items()
            }
    return found


def share(op: str, pass_: str, size: int, us: float, gemm_tflop_s: float) -> float:
    """size: tokens * hidden * intermediate."""
    return 2 * MATRICES[op] * PRODUCTS[pass_] * size / (us * 1e-6) / (gemm_tflop_s * 1e12)


def share_lines(
    rows: list[dict[str, Any]], pass_: str, metric: Metric, gemm_tflop_s: float
) -> dict[str, list[tuple[int, float]]]:
    """Label of a width -> (tokens, share of fused), in the order of the tokens."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (op, p, tokens, hidden, intermediate, *_), times in by_cell(rows, metric).items():
        if p == pass_ and op in MATRICES and "fused" in times:
            value = share(op, p, tokens * hidden * intermediate, times["fused"], gemm_tflop_s)
            lines.setdefault(f"{op} {hidden} -> {intermediate}", []).append((tokens, value))
    return {label: sorted(points) for label, points in lines.items()}


def groups(rows: list[dict[str, Any]], metric: Metric) -> Iterator[tuple[str, bool, list[dict[str, Any]]]]:
    """(part of the file's name, whether there are many shapes, rows) of each figure of a pass."""
    shapes = {key[2:5] for key in by_cell(rows, metric)}
    if len(shapes) <= BARS:
        yield "", False, rows
        return
    for op in dict.fromkeys(r["op"] for r in rows):
        yield f"{op}-", True, [r for r in rows if r["op"] == op]


def draw(content: dict[str, Any], folder: str | Path, metric: str | None = None, suffix: str = "png") -> list[Path]:
    """Writes speedup-<pass> and ceiling-<pass> of each pass in the result, of the grid of each operation too; returns
    their paths. The same result gives the same files."""
    try:
        import matplotlib
    except ImportError as error:
        raise common.BenchError(f"plots need matplotlib: {error}") from error
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusedmlp"}):
        return _draw(content, Path(folder), time_metric(content, metric), suffix)


def _draw(content: dict[str, Any], folder: Path, metric: Metric, suffix: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [NAMES[m] for m in ((metric,) if isinstance(metric, str) else metric)]
    note = f"{content['gpu']}, torch {content['torch']}, {content['date'][:10]}, {', '.join(names)}"
    written = []

    def save(figure: Any, name: str, title: str) -> None:
        figure.suptitle(f"{title}\n{note}", fontsize=10)
        written.append(folder / f"{name}.{suffix}")
        figure.savefig(written[-1], dpi=110, metadata={"Date": None} if suffix == "svg" else None)

    gemm = content["ceilings"]["gemm_tflop_s"]
    for pass_ in common.PASSES:
        for part, many, rows in groups(content["rows"], metric):
            what = f"{part}{pass_}".replace("-", ", ")
            lines = {base: speedups(rows, pass_, base, metric) for base in BASES}
            if any(lines.values()):
                save(_speedup_figure(lines), f"speedup-{part}{pass_}", f"Speed-up, {what}")
            if many:
                if shared := share_lines(rows, pass_, metric, gemm):
                    save(_share_figure(shared), f"ceiling-{part}{pass_}", f"Matrix products' rate, {what}")
            elif cells := shares(rows, pass_, metric, gemm):
                save(_bars_figure(cells), f"ceiling-{part}{pass_}", f"Matrix products' rate, {what}")
    return written


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plot_lines(axes: Any, lines: dict[str, list[tuple[int, float]]], colors: dict[str, Any]) -> None:
    for label, points in lines.items():
        xs, ys = [t for t, _ in points], [s for _, s in points]
        axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.2, label=label, color=colors[label])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _colors(labels: Sequence[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    shades = colormaps["turbo"]
    return {label: shades((i + 0.5) / len(labels)) for i, label in enumerate(labels)}


def _speedup_figure(lines: dict[str, dict[str, list[tuple[int, float]]]]) -> Any:
    labels = list(dict.fromkeys(label for of_base in lines.values() for label in of_base))
    figure, colors = _figure(11, 4.5), _colors(labels)
    drawn = list(figure.subplots(1, len(BASES), sharey=True))
    for axes, base in zip(drawn, BASES, strict=True):
        _plot_lines(axes, lines[base], colors)
        axes.set(xlabel="tokens", ylabel="speed-up of fused", title=f"over {base}")
    fullest = max(drawn, key=lambda axes: len(axes.lines))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _share_figure(lines: dict[str, list[tuple[int, float]]]) -> Any:
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    _plot_lines(axes, lines, _colors(list(lines)))
    axes.set(xlabel="tokens", ylabel="share of the card's bfloat16 product, fused")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _bars_figure(cells: dict[str, dict[str, float]]) -> Any:
    variants = list(dict.fromkeys(v for by_variant in cells.values() for v in by_variant))
    figure = _figure(max(7.0, 1.4 * len(cells) + 2), 4.8)
    axes = figure.subplots()
    width = 0.8 / len(variants)
    for k, v in enumerate(variants):
        there = [(i, by_variant[v]) for i, by_variant in enumerate(cells.values()) if v in by_variant]
        axes.bar([i + (k + 0.5) * width - 0.4 for i, _ in there], [s for _, s in there], width, label=v)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), list(cells), fontsize=8)
    axes.set_ylabel("share of the card's bfloat16 product")
    axes.legend(fontsize=8)
    return figure
