"""GeGLU (tanh, no bias) in bfloat16: eager PyTorch, torch.compile and fusedmlp, forward and training step.

    python bench/first.py            full run, under 4 minutes on an H200; bench/results/<gpu>/first.json
    python bench/first.py --quick    two shapes, fewer repeats; prints, and writes only with --out

A step is a forward and a backward with a random upstream gradient; x requires a gradient, gradients start as
None. Every variant gets the same weights and inputs; the sets of both that take turns are larger than the L2
cache.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from bench.script import script
from fusedmlp import FusedGeGLUMLP

SHAPES = ((8192, 768, 3072), (1024, 768, 3072), (128, 768, 3072), (8192, 2304, 9216))
QUICK = ((1024, 768, 3072), (128, 768, 3072))
ERROR_SHAPE = (1024, 768, 3072)
VARIANTS = ("eager", "compile", "fused")
TIMES = ("kernel_us", "graph_us", "wall_us")
# The profiler stays attached to the process once used, so everything by the clock comes before it.
PHASES = (("wall_us", "graph_us", "peak_bytes"), ("kernels", "kernel_us"))
DTYPE = torch.bfloat16


class GeGLU(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)); x [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": DTYPE}
        self.gate_proj = nn.Linear(hidden, intermediate, **options)
        self.up_proj = nn.Linear(hidden, intermediate, **options)
        self.down_proj = nn.Linear(intermediate, hidden, **options)
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Case:
    """One shape: its input sets, and the three variants of the same module for each set."""

    def __init__(self, shape: tuple[int, int, int], seed: int = 0) -> None:
        tokens, hidden, intermediate = shape
        torch.manual_seed(seed)
        self.sets = common.input_sets(2 * (2 * tokens * hidden + 3 * hidden * intermediate))
        eager = [GeGLU(hidden, intermediate) for _ in range(self.sets)]
        # A fresh start for each shape: else the compiler goes over to one kernel for all token counts.
        torch._dynamo.reset()
        self.modules: dict[str, list[Any]] = {
            "eager": list(eager),
            "compile": [torch.compile(m) for m in eager],
            "fused": [FusedGeGLUMLP.from_module(m) for m in eager],
        }
        sizes = [(tokens, hidden)] * self.sets
        self.x = [torch.randn(s, device="cuda", dtype=DTYPE, requires_grad=True) for s in sizes]
        self.dy = [torch.randn(s, device="cuda", dtype=DTYPE) for s in sizes]
        self.leaves = [[x, *m.parameters()] for x, m in zip(self.x, eager, strict=True)]

    def forward(self, variant: str) -> common.Call:
        modules = self.modules[variant]

        def call(i: int) -> Tensor:
            with torch.no_grad():
                return modules[i](self.x[i])

        return call

    def step(self, variant: str) -> common.Call:
        modules = self.modules[variant]

        def call(i: int) -> None:
            torch.autograd.backward(modules[i](self.x[i]), self.dy[i])
            for leaf in self.leaves[i]:
                leaf.grad = None

        return call

    def warm_up(self, call: common.Call) -> None:
        for i in [*range(self.sets), *range(min(3, self.sets))]:
            call(i)
        torch.cuda.synchronize()

    def errors(self, variant: str) -> dict[str, float]:
        """Relative error against float64 on set 0: of the output, and the largest one of the gradients."""
        truth = GeGLU(self.x[0].shape[1], self.modules["eager"][0].up_proj.out_features).double()
        truth.load_state_dict(self.modules["eager"][0].state_dict())
        x64 = self.x[0].detach().double().requires_grad_()
        y64 = truth(x64)
        torch.autograd.backward(y64, self.dy[0].double())
        y = self.modules[variant][0](self.x[0])
        torch.autograd.backward(y, self.dy[0])
        exact: list[Any] = [x64, *truth.parameters()]
        pairs: list[Any] = list(zip(self.leaves[0], exact, strict=True))
        worst = max(common.relative_error(a.grad, b.grad) for a, b in pairs)
        for leaf in self.leaves[0]:
            leaf.grad = None
        return {"forward": common.relative_error(y, y64.detach()), "step": worst}


def meters(case: Case, calls: dict[str, common.Call], quick: bool) -> dict[str, Any]:
    """Metric -> function that measures it: {variant: values}."""
    rounds = (12, 6, 2) if quick else (40, 15, 3)
    return {
        "wall_us": lambda: common.wall_us(calls, case.sets, rounds[0]),
        "graph_us": lambda: common.graph_us(calls, case.sets, rounds[1]),
        "peak_bytes": lambda: {v: common.peak_bytes(c) for v, c in calls.items()},
        "kernels": lambda: {v: common.kernels(c) for v, c in calls.items()},
        "kernel_us": lambda: common.kernel_us(calls, case.sets, rounds[2]),
    }


def measure(
    shape: tuple[int, int, int], metrics: Sequence[str], variants: Sequence[str], quick: bool
) -> tuple[list[dict[str, Any]], int]:
    """The rows of these metrics at one shape, and how many measurements failed (each is printed)."""
    case = Case(shape)
    rows: list[dict[str, Any]] = []
    failed = 0
    for pass_ in ("forward", "step"):
        calls = {v: getattr(case, pass_)(v) for v in variants}
        for call in calls.values():
            case.warm_up(call)
        measured = meters(case, calls, quick)
        for metric in metrics:
            try:
                found = measured[metric]()
            except Exception:  # the other measurements are still worth having
                failed += 1
                print(f"{metric} of {pass_} at {shape} failed:\n{traceback.format_exc()}", file=sys.stderr)
                continue
            rows += [common.row("geglu", pass_, shape, v, metric, values) for v, values in found.items()]
    if shape == ERROR_SHAPE and "wall_us" in metrics:
        for variant in variants:
            for pass_, error in case.errors(variant).items():
                rows.append(common.row("geglu", pass_, shape, variant, "rel_error", [error]))
    return rows, failed


def place(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Where a row stands in the file: by width, tokens, pass and metric."""
    numbers = common.PASSES.index(row["pass"]), common.METRICS.index(row["metric"])
    return row["hidden"], -row["tokens"], *numbers


def table(rows: list[dict[str, Any]]) -> tuple[str, int]:
    """The run as aligned text, and in how many timed cells fused is not faster than eager (marked with !)."""
    cells = {(r["tokens"], r["hidden"], r["pass"], r["metric"], r["variant"]): r["median"] for r in rows}
    keys = list(dict.fromkeys(k[:4] for k in cells))
    lines = [f"{'tokens':>6} {'hidden':>6} {'pass':8}{'metric':11}" + "".join(f"{v:>13}" for v in VARIANTS)]
    lines[0] += f"{'eager/fused':>13}{'compile/fused':>15}"
    slower = 0
    for key in keys:
        got = [cells.get((*key, v)) for v in VARIANTS]
        eager, compiled, fused = got
        text = "".join(f"{'-' if v is None else f'{v:.6g}' if v < 1e6 else f'{v:.0f}':>13}" for v in got)
        for other, width in ((eager, 13), (compiled, 15)):
            text += f"{f'{other / fused:.2f}' if other is not None and fused else '-':>{width}}"
        if key[3] in TIMES and eager is not None and fused is not None and fused >= eager:
            slower += 1
            text += " !"
        lines.append(f"{key[0]:>6} {key[1]:>6} {key[2]:8}{key[3]:11}{text}")
    return "\n".join(lines), slower


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, fewer repeats; for a look, not for results")
    parser.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/first.json)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args(argv)
    gpu = common.need_gpu()
    begin = time.perf_counter()
    ceilings = common.ceilings()
    rows: list[dict[str, Any]] = []
    failed = 0
    for metrics in PHASES:
        for shape in QUICK if args.quick else SHAPES:
            try:
                more, broken = measure(shape, metrics, args.variants, args.quick)
                rows += more
                failed += broken
            except Exception:  # the other shapes are still worth having
                failed += 1
                print(f"{shape} failed:\n{traceback.format_exc()}", file=sys.stderr)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{shape}, {', '.join(metrics)}: done at {time.perf_counter() - begin:.0f} s", flush=True)
    if not rows:
        return 1
    rows.sort(key=place)
    content = common.result("first", rows, ceilings, gpu)
    text, slower = table(rows)
    versions = f"driver {content['driver']}, torch {content['torch']}, triton {content['triton']}"
    print(f"\n{gpu}, {versions}; {ceilings}\n{text}")
    print(f"fused not faster than eager (!): {slower} cells; measurements that failed: {failed}")
    if args.out or not args.quick:
        print(f"written: {common.write(content, args.out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
