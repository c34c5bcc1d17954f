"""Measure candidate settings of every GEMM kernel on this GPU and write the table that the package ships.

    python bench/sweep.py                     fusedmlp/settings/<gpu>.json and bench/results/<gpu>/sweep.json
    python bench/sweep.py --out FILE --log FILE --tokens 128 1024 --jobs 16 --minutes 8

Candidates, measuring and the choice are those of ``python -m fusedmlp tune`` (fusedmlp/tune); this keeps every
measurement too, and takes what it measured in bfloat16 for float16.

What it should cost on an H200 (an estimate; every line that it prints has its seconds): 0.2 to 0.6 s for a kernel at a
shape, 1 to 2 s where a call takes 10 ms and more, once its candidates are compiled. Each of these compiles once for all
shapes whose widths are multiples of 16, 1 to 5 s on one core and 150 of them in all: --jobs N compiles them ahead in N
processes, each with a CUDA context of half a GB. Both files are written after every kernel of a width, with what is
measured until then; --minutes ends the run in time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ahead, common
from bench.heuristic import measured
from bench.script import script
from fusedmlp.settings.device import info
from fusedmlp.settings.types import FAMILIES
from fusedmlp.tune.candidates import CANDIDATES, NOT_TABLED, PASS, Choice, candidates, choose, sizes
from fusedmlp.tune.files import merged, today, write_table
from fusedmlp.tune.measure import METHOD, measure

WIDTHS = ((384, 1536), (768, 3072), (1024, 4096), (2304, 9216), (4096, 14336))
TOKENS = (16, 64, 128, 1024, 2048, 8192)
HEAD = ("gpu", "torch", "triton", "date")


def sweep(
    op: str, M: int, D: int, H: int, dtype: torch.dtype, rows: list[dict[str, Any]], families: Sequence[str] = FAMILIES
) -> Choice | None:
    """What the rule takes of the right candidates at one shape; a row for each that ran."""
    begin = time.perf_counter()
    found = measure(op, M, D, H, str(dtype).removeprefix("torch."), families)
    for candidate, reason in found.left_out:
        print(f"  left out: {op} [{M}, {D} -> {H}] {candidate}: {reason}")
    for candidate, times in found.times:
        rows.append(common.row(op, PASS[op], (M, D, H), str(candidate), "graph_us", times))
    chosen = choose(op, M, dtype, found.medians)
    if chosen is not None:
        took = time.perf_counter() - begin
        print(f"{op:13s} [{M:5d}, {D:4d} -> {H:5d}] {chosen.us:8.1f} us  {chosen.settings}  ({took:.1f} s)", flush=True)
    return chosen


def table_rows(op: str, M: int, D: int, H: int, found: Choice) -> list[dict[str, Any]]:
    N, K = sizes(op, D, H)
    rows = []
    for dtype in ("bfloat16", "float16"):  # operands of one size at one tensor-core rate
        row = {"op": op, "dtype": dtype, "precision": "", "M": M, "N": N, "K": K}
        timed = found.row() if dtype == "bfloat16" else {"settings": asdict(found.settings)}
        rows.append({**row, **timed})
    return rows


def from_results(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a table that the rule makes of result files; needs no GPU."""
    rows = []
    for (op, (M, D, H)), times in sorted(measured([Path(path) for path in paths]).items()):
        by_name = {str(c): c for c in candidates(op, M, tma=True, gluon=True)}
        found = choose(op, M, torch.bfloat16, [(c, times[name]) for name, c in by_name.items() if name in times])
        if found is not None and op not in NOT_TABLED:
            rows += table_rows(op, M, D, H, found)
    return rows


def rebuild(paths: Sequence[str], out: str | None) -> int:
    if out is None:
        print("--from-results needs --out, the table to make", file=sys.stderr)
        return 2
    newest = max((common.load(path) for path in paths), key=lambda content: str(content["date"]))
    rows = from_results(paths)
    write_table(Path(out), {**{name: newest[name] for name in HEAD}, "method": METHOD}, rows)
    print(f"{len(rows)} rows to {out}")
    return 0


class Sweep:
    """The table and the log of a run."""

    def __init__(self, out: str | None, log: str | None, gpu: str) -> None:
        slug = info(torch.device("cuda")).slug
        shipped = common.ROOT / "fusedmlp" / "settings" / f"{slug}.json"
        self.out, self.log, self.gpu = Path(out) if out else shipped, log, gpu
        self.shipped = json.loads(shipped.read_text())["rows"] if shipped.is_file() else []
        self.ceilings = common.ceilings()
        self.measured: list[dict[str, Any]] = []
        self.table: list[dict[str, Any]] = []

    def width(self, op: str, D: int, H: int, tokens: Sequence[int], families: Sequence[str] = FAMILIES) -> None:
        for M in tokens:
            found = sweep(op, M, D, H, torch.bfloat16, self.measured, families)
            if found is not None and op not in NOT_TABLED:
                self.table += table_rows(op, M, D, H, found)

    def write(self) -> str:
        """Both files, as far as the run has come; returns what they hold, in words."""
        if not self.measured:
            return "nothing was measured"
        result = common.result("sweep", self.measured, self.ceilings, self.gpu)
        versions = {name: result[name] for name in ("torch", "triton")}
        table = merged(self.shipped, self.table)
        write_table(self.out, {"gpu": self.gpu, **versions, "date": today(), "method": METHOD}, table)
        log = common.write(result, self.log)
        return f"{len(table)} rows to {self.out}, {len(self.measured)} measurements to {log}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    made.add_argument("--widths", nargs="+", default=[f"{d},{h}" for d, h in WIDTHS], metavar="D,H")
    made.add_argument("--ops", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    made.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="of candidates")
    made.add_argument("--out", help="the table (default: fusedmlp/settings/<gpu>.json)")
    made.add_argument("--log", help="all measurements (default: bench/results/<gpu>/sweep.json)")
    made.add_argument("--jobs", type=int, default=0, metavar="N", help="compile all candidates ahead in N processes")
    made.add_argument("--minutes", type=float, default=float("inf"), help="begin no kernel of a width after that")
    made.add_argument(
        "--from-results",
        nargs="+",
        metavar="FILE",
        help="measure nothing: make the table --out anew, of these files alone (what is shipped: of sweep*.json)",
    )
    return made


@script
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    begin = time.perf_counter()
    if args.from_results:
        return rebuild(args.from_results, args.out)
    gpu = common.need_gpu()
    widths: list[tuple[int, int]] = []
    for width in args.widths:
        D, H = (int(n) for n in width.split(","))
        widths.append((D, H))
    if args.jobs > 0:
        shapes = [(M, D, H) for D, H in widths for M in args.tokens]
        ahead.run(ahead.kernel_tasks(args.ops, shapes, "bfloat16", args.families), args.jobs)
    run = Sweep(args.out, args.log, gpu)
    said = "nothing was measured"
    for D, H in widths:  # a run that is cut off has all kernels of the widths that it reached
        for op in args.ops:
            if time.perf_counter() - begin > args.minutes * 60:
                print(f"not measured in the {args.minutes:g} minutes: {op} {D} -> {H}")
                continue
            run.width(op, D, H, args.tokens, args.families)
            said = run.write()
    print(said)
    return 0 if run.measured else 1


if __name__ == "__main__":
    sys.exit(main())
