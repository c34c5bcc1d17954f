"""``python -m fusedmlp explain TRACE``: read a trace of torch.profiler and say what is in it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="read a trace of torch.profiler: kernels in words, waits, and which layers would fuse what",
        description="Reads a Chrome trace of torch.profiler (json or json.gz, of any size): launches of each step, who "
        "waits for whom, kernel names in words, and the chains of kernels that a layer of fusedmlp replaces. Needs no "
        "GPU. Exit code 2 where the file is no such trace.",
    )
    parser.add_argument("trace", metavar="TRACE", help="what torch.profiler.profile.export_chrome_trace() wrote")
    parser.add_argument("--top", type=_positive, default=12, metavar="N", help="rows of the kernel tables (default 12)")
    parser.add_argument("--json", metavar="FILE", help="write everything to FILE as JSON; - for stdout, and no tables")
    parser.add_argument("--html", metavar="FILE", help="write a page with a timeline of one step to FILE")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def main(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 2 where the file cannot be read as a trace or a report cannot be written."""
    from .tables import any_name, progress_bar
    from .trace.load import load
    from .trace.stream import TraceError
    from .trace_report import TraceReport

    any_name()
    path = Path(args.trace)
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    try:
        with progress_bar(size, path.name) as progress:
            report = TraceReport(load(path, progress))
    except TraceError as error:
        print(f"fusedmlp explain: {error}", file=sys.stderr)
        return 2
    try:
        _write(report, args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; Python would complain again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"fusedmlp explain: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _write(report: Any, args: argparse.Namespace) -> None:
    """Files first, then what goes to stdout."""
    text = json.dumps(report.as_dict(), indent=1) if args.json else ""
    if args.json and args.json != "-":
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.html:
        from .html import write_html

        write_html(args.html, [report], title=Path(args.trace).name)
    if args.json == "-":
        print(text)
    else:
        report.show(args.top)
