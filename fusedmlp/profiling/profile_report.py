"""What ``profile`` prints and writes: guess and seen, the kernels of each variant, products against the card's
ceilings, one JSON file and one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .guess import Guess
from .html import Page, write_html
from .profile_run import Ceilings, Result, product_rows, whole_passes
from .tables import show_table
from .verdict import Product


def show_guesses(found: Sequence[tuple[str, str, Guess]]) -> None:
    """Before anything has run: variant, pass and guess."""
    rows = [(name, p, g.kernels, g.why) for name, p, g in found]
    show_table("Guess: kernels of a call", ("variant", "pass", "kernels", "why"), rows, left=(0, 1, 3))


def show(results: Sequence[Result], ceilings: Ceilings | None, top: int) -> None:
    """Print everything that was seen."""
    rows = [(r.variant, r.pass_, r.guess.kernels, _seen(r), _mark(r)) for r in results]
    show_table("Guessed and seen", ("variant", "pass", "guess", "seen", ""), rows, left=(0, 1, 4))
    if not torch.cuda.is_available():
        print("No CUDA device: seen is what the host dispatched, which says nothing of compiled code; no device times.")
        return
    for r in results:
        for line in r.differences():
            print(f"  {r.variant} {r.pass_} {line}")
    _show_times(results)
    for r in results:
        _show_kernels(r, top)
    _show_products(results, ceilings)
    for r in results:
        for group in r.report.chains:
            print(f"{r.variant} {r.pass_}: {group}")


def _seen(r: Result) -> str:
    if r.seen is None:
        return "?"
    return f"{r.seen} + {r.split} split-K" if r.split else str(r.seen)


def _mark(r: Result) -> str:
    return r.mark if r.mark in ("equal", "not seen") else f"DIFFERS by {r.mark}"


def _show_times(results: Sequence[Result]) -> None:
    rows = []
    for r in results:
        s = r.report.stats.steps[r.report.step]
        numbers = (r.host_us, s.kernel_us, s.busy_us, s.idle_us)
        rows.append((r.variant, r.pass_, *(f"{v:.1f}" for v in numbers), str(r.verdict)))
    columns = ("variant", "pass", "host us", "kernel us", "busy us", "idle us", "verdict")
    show_table("A call (host time without, the rest with the profiler)", columns, rows, left=(0, 1, 6))


def _show_kernels(r: Result, top: int) -> None:
    steps = max(1, sum(s.kernels > 0 for s in r.report.stats.steps))
    rows = [
        (k.decoded.text, k.op, k.name if len(k.name) <= 60 else k.name[:57] + "...", f"{k.count / steps:g}")
        + (f"{k.total_us / steps:.1f}", f"{k.share:.1%}")
        for k in r.report.stats.kernels[:top]
    ]
    columns = ("operation", "host op", "device kernel", "launches", "us", "share")
    show_table(f"{r.variant} {r.pass_}: kernels of a step", columns, rows, left=(0, 1, 2))


def _show_products(results: Sequence[Result], ceilings: Ceilings | None) -> None:
    if ceilings is None:
        return
    rows = [
        (name, f"{p.M} x {p.N} x {p.K}", f"{p.us:.1f}", f"{p.flop / 1e9:.2f}", f"{p.bytes / 1e6:.1f}")
        + (f"{p.tflop_s:.0f}", f"{p.tb_s:.2f}", _bound(p, ceilings))
        for name, p in product_rows(results)
    ]
    rows += [
        (f"{r.variant} {r.pass_}", "all kernels", f"{us:.1f}", f"{flop / 1e9:.2f}", "", f"{rate:.0f}", "")
        + (f"{rate / ceilings.gemm_tflop_s:.0%} of the TFLOP/s",)
        for r, flop, us, rate in whole_passes(results)
    ]
    if not rows:
        return
    columns = ("of", "M x N x K", "us", "GFLOP", "MB", "TFLOP/s", "TB/s", "against the ceiling")
    title = f"Products (this card: {ceilings.gemm_tflop_s:.0f} TFLOP/s, {ceilings.copy_tb_s:.2f} TB/s)"
    show_table(title, columns, rows, left=(0, 1, 7))


def _bound(p: Product, ceilings: Ceilings) -> str:
    compute, memory = p.tflop_s / ceilings.gemm_tflop_s, p.tb_s / ceilings.copy_tb_s
    return f"compute-bound, {compute:.0%}" if compute >= memory else f"memory-bound, {memory:.0%}"


def write(results: Sequence[Result], title: str, ceilings: Ceilings | None, out: Path) -> tuple[Path, Path]:
    """Write report.json and report.html into ``out``; returns both paths."""
    rows = [
        {"variant": r.variant, "pass": r.pass_, "guess": r.guess.kernels, "seen": r.seen, "mark": _mark(r)}
        | {"split_k": r.split, "why": r.guess.why}
        for r in results
    ]
    content: dict[str, Any] = {
        "workload": title,
        "torch": torch.__version__,
        "ceilings": ceilings.as_dict() if ceilings else None,
        "guesses": rows,
        "results": [_result(r) for r in results],
    }
    data = out / "report.json"
    data.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    names = [f"{r.variant} {r.pass_}" for r in results]
    about = f"{results[0].report.device}, torch {torch.__version__}"
    page = write_html(out / "report.html", [r.report for r in results], Page(title, about, names, rows))
    return data, page


def _result(r: Result) -> dict[str, Any]:
    head = {"variant": r.variant, "pass": r.pass_, "seen": r.seen, "split_k": r.split, "host_us": r.host_us}
    return head | {"guess": asdict(r.guess), "trace": f"traces/{r.trace.name}", "report": r.report.as_dict()}
