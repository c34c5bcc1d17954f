"""One self-contained page: a timeline of one step of each variant, launches, guesses, kernels. It needs no network."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .names import decode
from .trace.model import ApiCall, Op, Work
from .trace.stats import KernelStats
from .trace_report import TraceReport

MAX_ITEMS = 20_000  # of the host, and of the device, in one step; beyond, the shortest are left out
_KINDS = {"copy": "copy", "fill": "copy", "memcpy": "copy", "memset": "copy", "softmax": "reduction"}
_KINDS |= {"norm": "reduction"}
_DRAWN = {"gemm", "attention", "convolution", "elementwise", "reduction"}


@dataclass
class Page:
    """What the page shows beside the timelines. guesses: rows with variant, pass, guess, seen, mark and why."""

    title: str
    about: str = ""
    names: Sequence[str] = ()
    guesses: Sequence[dict[str, Any]] = field(default_factory=list)


def write_html(path: str | Path, reports: Sequence[TraceReport], page: Page | None = None, title: str = "") -> Path:
    """Write the page for one report or several side by side (``page.names``: what to call them). Returns the path."""
    page = page or Page(title, f"{reports[0].device}, {reports[0].trace.path}")
    names = list(page.names) or [Path(r.trace.path).name for r in reports]
    content = {
        "title": page.title,
        "about": page.about,
        "guesses": list(page.guesses),
        "variants": [_variant(name, report) for name, report in zip(names, reports, strict=True)],
    }
    # "</script>" in a name would end the element that holds the data, "<!--<script>" would hide its end.
    text = json.dumps(content).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    path = Path(path)
    path.write_text(template.replace("__DATA__", text), encoding="utf-8")
    return path


def _variant(name: str, report: TraceReport) -> dict[str, Any]:
    stats = report.stats.steps[report.step]
    lanes, length = _lanes(report)
    return {
        "name": name,
        "launches": stats.kernels,
        "verdict": str(report.verdict),
        "length": length,
        "lanes": lanes,
        "kernels": [_kernel(k) for k in report.stats.kernels[:40]],
        "chains": [str(group) for group in report.chains],
    }


def _kernel(k: KernelStats) -> dict[str, Any]:
    return {"name": k.name, "text": k.decoded.text, "us": k.total_us, "share": k.share, "count": k.count, "op": k.op}


def _lanes(report: TraceReport) -> tuple[list[dict[str, Any]], float]:
    """Lanes of the step, host threads first, and its length in microseconds; times from the step's begin."""
    step, work = report.trace.steps[report.step], report.work
    begin = step.start
    end = max([step.end, *(w.end for w in work)])
    host: list[Op | ApiCall] = [*report.trace.ops, *report.trace.calls]
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for item in _longest([e for e in host if e.start >= begin and e.end <= end]):
        around = item.parent if isinstance(item, Op) else item.op
        depth, kind = len(around.line()) if around is not None else 0, "op" if isinstance(item, Op) else "call"
        threads[item.thread].append(_box(item.name, item.start - begin, item.duration, depth, kind))
    lanes = [_lane(f"host thread {i + 1}", items) for i, items in enumerate(threads.values())]
    streams: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for w in _longest(work):
        streams[w.device, w.stream].append(w)
    for (device, stream), items in sorted(streams.items()):
        lanes.append(_lane(f"cuda:{device} stream {stream}", [_work(w, begin) for w in items]))
    return lanes, end - begin


def _longest(events: Sequence[Any]) -> list[Any]:
    """What is drawn of some events, in order of start."""
    return sorted(sorted(events, key=lambda e: -e.duration)[:MAX_ITEMS], key=lambda e: e.start)


def _lane(name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "items": items, "depth": 1 + max((i["l"] for i in items), default=0)}


def _box(name: str, start: float, duration: float, level: int, kind: str) -> dict[str, Any]:
    return {"n": name, "s": round(start, 3), "d": round(duration, 3), "l": level, "c": kind}


def _work(w: Work, begin: float) -> dict[str, Any]:
    decoded = decode(w.name)
    kind = _KINDS.get(decoded.family, decoded.family)
    box = _box(w.name, w.start - begin, w.duration, 0, kind if kind in _DRAWN or kind == "copy" else "other")
    return box | {"t": decoded.text, "o": _launcher(w.op)}


def _launcher(op: Op | None) -> str:
    """The operation, and the outermost one that it runs within."""
    if op is None:
        return ""
    outer = op.line()[-1].name
    return op.name if outer == op.name else f"{op.name} in {outer}"
