"""The first call of a process: with nothing in Triton's cache, and with everything.

    python bench/cold.py            under 2 minutes; bench/results/<gpu>/cold.json

Each measurement is a process of its own, whose TRITON_CACHE_DIR is a temporary folder: empty for the first, and what
the first left there for those that follow. Time runs from the first call of a layer (bfloat16, 128 tokens) until the
device is idle again; the device and cuBLAS were in use before, Triton was not imported. "step" is the first training
step that follows the first forward. Exit code 1 where a first forward takes longer than it may.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMITS = {"cold": 10.0, "warm": 1.0}  # seconds, of a first forward
SHAPES = {"geglu": (128, 768, 3072), "relu_mlp": (128, 1024, 1024)}
MARK = "first calls: "


def child(op: str) -> dict[str, float]:
    """Seconds of the first forward, and of the first step after it."""
    import torch

    from fusedmlp import FusedGeGLUMLP, FusedReLUMLP

    tokens, hidden, intermediate = SHAPES[op]
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = FusedGeGLUMLP(hidden, intermediate, **options) if op == "geglu" else FusedReLUMLP([hidden] * 4, **options)
    x, gy = (torch.randn(tokens, hidden, **options) for _ in range(2))
    torch.mm(x, x.t())
    torch.cuda.synchronize()

    def timed(call: Any) -> float:
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    with torch.no_grad():
        forward = timed(lambda: layer(x))
    return {"forward": forward, "step": timed(lambda: torch.autograd.backward(layer(x), gy))}


def run(op: str, cache: str) -> dict[str, float]:
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--child", op]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))  # type: ignore[no-any-return]
    raise RuntimeError(f"the process of {op} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def measure(op: str, warm: int) -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as cache:
        return {"cold": [run(op, cache)], "warm": [run(op, cache) for _ in range(warm)]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=3, help="processes with a warm cache (default: 3)")
    parser.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/cold.json)")
    parser.add_argument("--child", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(MARK + json.dumps(child(args.child)), flush=True)
        return 0
    from bench import common

    try:
        gpu = common.need_gpu()
    except common.BenchError as error:
        print(f"bench/cold.py: {error}", file=sys.stderr)
        return 2
    ceilings = common.ceilings(5)
    rows: list[dict[str, Any]] = []
    missed = 0
    for op, shape in SHAPES.items():
        for state, found in measure(op, args.warm).items():
            for pass_ in ("forward", "step"):
                values = [one[pass_] * 1e6 for one in found]
                bias = op == "relu_mlp"
                rows.append(common.row(op, pass_, shape, f"fused_{state}_cache", "wall_us", values, bias=bias))
                text = f"{op}, first {pass_}, {state} cache: {rows[-1]['median'] / 1e6:.2f} s"
                if pass_ == "forward":
                    holds = rows[-1]["median"] / 1e6 <= LIMITS[state]
                    missed += not holds
                    text += f", at most {LIMITS[state]:.0f} s: {'holds' if holds else 'MISSED'}"
                print(text, flush=True)
    print(f"written: {common.write(common.result('cold', rows, ceilings, gpu), args.out)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
