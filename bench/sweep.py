"""Measure candidate settings of every GEMM kernel on this GPU and write the table that the package ships.

    python bench/sweep.py                     fusedmlp/settings/<gpu>.json and bench/results/<gpu>/sweep.json
    python bench/sweep.py --out FILE --log FILE --tokens 128 1024

Candidates, measuring and the choice are those of ``python -m fusedmlp tune`` (fusedmlp/tune); this keeps every
measurement too, and takes what it measured in bfloat16 for float16.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from fusedmlp.settings.device import info
from fusedmlp.tune.candidates import CANDIDATES, NOT_TABLED, PASS, Choice, choose, sizes
from fusedmlp.tune.files import merged, today, write_table
from fusedmlp.tune.measure import METHOD, measure

WIDTHS = ((384, 1536), (768, 3072), (1024, 4096), (2304, 9216), (4096, 14336))
TOKENS = (16, 64, 128, 1024, 2048, 8192)


def sweep(op: str, M: int, D: int, H: int, dtype: torch.dtype, rows: list[dict[str, Any]]) -> Choice | None:
    """What the rule takes of the right candidates at one shape; a row for each that ran."""
    found = measure(op, M, D, H, str(dtype).removeprefix("torch."))
    for candidate, reason in found.left_out:
        print(f"  left out: {op} [{M}, {D} -> {H}] {candidate}: {reason}")
    for candidate, times in found.times:
        rows.append(common.row(op, PASS[op], (M, D, H), str(candidate), "graph_us", times))
    chosen = choose(op, dtype, found.medians)
    if chosen is not None:
        print(f"{op:13s} [{M:5d}, {D:4d} -> {H:5d}] {chosen.us:8.1f} us  {chosen.settings}", flush=True)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--widths", nargs="+", default=[f"{d},{h}" for d, h in WIDTHS], metavar="D,H")
    parser.add_argument("--ops", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--out", help="the table (default: fusedmlp/settings/<gpu>.json)")
    parser.add_argument("--log", help="all measurements (default: bench/results/<gpu>/sweep.json)")
    args = parser.parse_args()
    try:
        gpu = common.need_gpu()
    except common.BenchError as error_:
        print(error_, file=sys.stderr)
        return 2
    measured: list[dict[str, Any]] = []
    table: list[dict[str, Any]] = []
    for op in args.ops:
        for width in args.widths:
            D, H = (int(n) for n in width.split(","))
            for M in args.tokens:
                found = sweep(op, M, D, H, torch.bfloat16, measured)
                if found is None or op in NOT_TABLED:
                    continue
                N, K = sizes(op, D, H)
                for dtype in ("bfloat16", "float16"):  # operands of one size at one tensor-core rate
                    row = {"op": op, "dtype": dtype, "precision": "", "M": M, "N": N, "K": K}
                    timed = found.row() if dtype == "bfloat16" else {"settings": asdict(found.settings)}
                    table.append({**row, **timed})
    slug = info(torch.device("cuda")).slug
    shipped = common.ROOT / "fusedmlp" / "settings" / f"{slug}.json"
    out = Path(args.out) if args.out else shipped
    table = merged(json.loads(shipped.read_text())["rows"] if shipped.is_file() else [], table)
    result = common.result("sweep", measured, common.ceilings(), gpu)
    versions = {name: result[name] for name in ("torch", "triton")}
    write_table(out, {"gpu": gpu, **versions, "date": today(), "method": METHOD}, table)
    log = common.write(result, args.log)
    print(f"{len(table)} rows to {out}, {len(measured)} measurements to {log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
