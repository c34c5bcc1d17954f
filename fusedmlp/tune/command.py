"""``python -m fusedmlp tune``: arguments in, exit code out."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import CANDIDATES, LAYERS, TOKENS, TuneError, tune
from .candidates import DTYPES

DESCRIPTION = """Measures candidate settings of every kernel on this GPU and writes a settings table, which the package
reads from then on. What the table has from this GPU and these versions of PyTorch and Triton is not measured again,
so that the same command goes on where an earlier one stopped."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure settings on this GPU for your widths", description=DESCRIPTION)
    parser.add_argument(
        "--widths",
        nargs="+",
        required=True,
        metavar="D,H",
        help="hidden and intermediate width of each layer, e.g. 768,3072 1024,4096",
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        default=list(TOKENS),
        metavar="M",
        help=f"batch times sequence length, at most 8 counts (default: {' '.join(map(str, TOKENS))})",
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help=f"of {', '.join(DTYPES)} (default: bfloat16)")
    parser.add_argument(
        "--layers", nargs="+", default=["geglu", "mlp"], help=f"of {', '.join(LAYERS)} (default: geglu mlp)"
    )
    parser.add_argument("--ops", nargs="+", help=f"only these kernels, of {', '.join(CANDIDATES)} (default: all)")
    parser.add_argument("--out", metavar="FILE", help="the table (default: where the package reads yours)")
    parser.add_argument("--minutes", metavar="N", help="begin no further shape after N minutes")
    parser.add_argument("--restart", action="store_true", help="measure everything anew; an old file becomes FILE.bak")


def run(args: argparse.Namespace) -> int:
    """Tunes and prints the report. Returns 0, or 1 where a shape got no row.

    Raises:
        TuneError: a request that cannot be met.
    """
    widths = [_pair(width) for width in args.widths]
    tokens = [_whole("--tokens", M) for M in args.tokens]
    budget = None if args.minutes is None else _minutes(args.minutes) * 60
    report = tune(widths, tokens, args.dtypes, args.layers, args.ops, args.out, resume=not args.restart, budget=budget)
    print(report)
    return 1 if report.failed else 0


def main(args: argparse.Namespace) -> int:
    """Like :func:`run`, with messages for the user: exit code 2 for a request that cannot be met, 130 when stopped."""
    try:
        return run(args)
    except TuneError as error:
        print(f"fusedmlp tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfusedmlp tune: stopped; what was measured is kept, the same command goes on", file=sys.stderr)
        return 130


def _whole(option: str, text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise TuneError(f"{option} takes whole numbers, e.g. {option} 1 128 8192; got {text!r}") from None


def _pair(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise TuneError(f"--widths takes pairs D,H of whole numbers, e.g. --widths 768,3072 1024,4096; got {text!r}")
    return int(parts[0]), int(parts[1])


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise TuneError(f"--minutes takes a number above 0, e.g. --minutes 30; got {text!r}")
    return value
