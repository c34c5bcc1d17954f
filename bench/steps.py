"""Whole passes under other plans: which kernels a forward and a training step are best made of, under sustained load.

    python bench/steps.py                    bench/results/<gpu>/steps.json, about 3 minutes
    python bench/steps.py --op geglu --shapes 8192x768x3072 1024x2304x9216 --compile --jobs 16
    python bench/steps.py --passes step --only gradients    what the products after the hidden layer are best made of

bench/sweep.py measures each kernel by itself, candidates in turns of some milliseconds. A step is more than its
kernels: what draws less power lets the others run at a higher clock, and a launch less is a gap less. So here a pass is
a CUDA graph that runs alone for 80 ms a turn (graph_alone_us), and in short turns with the others (graph_us). "plan" is
what the package does; every other variant differs from it in the kernels that its name tells. eager, and with --compile
torch.compile, stand beside them.

Exit code: 0; 1 where a variant raised or nothing was measured; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ahead, common
from bench.case import Case, Shape, parse_shape
from bench.rows import Rows
from bench.script import script
from fusedmlp import settings
from fusedmlp.settings.types import Settings
from fusedmlp.tune.candidates import gluon, tma

Plan = dict[str, Settings]  # op -> its settings, where they are not the plan's own

PAIR = Settings("pair")
PINGPONG, COOPERATIVE = gluon(128, 64, 64, 1, 4, 6), gluon(128, 128, 64, 1, 8, 4)
TOGETHER, APART = gluon(128, 128, 64, 2, 4, 6), {"glu_grads": PAIR, "glu_weight_grads": PAIR}
LOW = gluon(64, 128, 64, 2, 4, 6)
DX = {"dX by cuBLAS": PAIR, "dX 128x256": tma(128, 256, 64, 2, 8, 4, 1), "dX 128x128": tma(128, 128, 64, 2, 4, 3, 2)}

FORWARD: dict[str, dict[str, Plan]] = {
    "geglu": {
        "gate and up ping-pong": {"glu": PINGPONG},
        "gate and up cooperative": {"glu": COOPERATIVE},
        "gate and up by cuBLAS": {"glu": PAIR},
    },
    "mlp_relu": {
        "first layer ping-pong": {"linear_relu": gluon(128, 128, 64, 2, 4, 6)},
        "first layer cooperative": {"linear_relu": gluon(128, 256, 64, 4, 8, 4)},
        "first layer 128x256": {"linear_relu": tma(128, 256, 64, 2, 8, 4, 1)},
        "first layer by cuBLAS": {"linear_relu": PAIR},
    },
}
STEP: dict[str, dict[str, Plan]] = {
    "geglu": {
        **FORWARD["geglu"],
        "hidden by cuBLAS": {"glu_backward": PAIR},
        "gradients apart": APART,
        **{f"gradients apart, {name}": {**APART, "dual_dgrad": found} for name, found in DX.items()},
        "gradients of weights together": {"glu_grads": PAIR, "glu_weight_grads": TOGETHER},
        "gradients of weights together, dX by cuBLAS": {
            "glu_grads": PAIR,
            "glu_weight_grads": TOGETHER,
            "dual_dgrad": PAIR,
        },
        "gradients together": {"glu_grads": TOGETHER},
        "gradients together, 64 rows": {"glu_grads": LOW},
    },
    "mlp_relu": {
        **FORWARD["mlp_relu"],
        "hidden ping-pong": {"act_backward": gluon(128, 128, 64, 4, 4, 4)},
        "hidden 128x128": {"act_backward": tma(128, 128, 64, 2, 8, 4, 1)},
        "hidden by cuBLAS": {"act_backward": PAIR},
        "gradients apart": {"mlp_grads": PAIR, "mlp_weight_grads": PAIR},
        "gradients apart, dX by cuBLAS": {"mlp_grads": PAIR, "mlp_weight_grads": PAIR, "dgrad": PAIR},
        "gradients of weights together": {"mlp_grads": PAIR, "mlp_weight_grads": TOGETHER},
        "gradients of weights together, dX by cuBLAS": {
            "mlp_grads": PAIR,
            "mlp_weight_grads": TOGETHER,
            "dgrad": PAIR,
        },
        "gradients together": {"mlp_grads": TOGETHER},
        "gradients together, 64 rows": {"mlp_grads": LOW},
    },
}
CANDIDATES = {"forward": FORWARD, "step": STEP}
SHAPES: tuple[Shape, ...] = tuple(
    (tokens, *widths)
    for widths in ((768, 3072), (1024, 4096), (2304, 9216), (4096, 14336))
    for tokens in (512, 1024, 2048, 8192)
)
SAME_KERNEL = {"mlp_grads": "glu_grads", "mlp_weight_grads": "glu_weight_grads"}
METRICS = ("graph_us", "graph_alone_us")


def under(plan: Plan, call: common.Call) -> common.Call:
    """The call with these settings in the place of the plan's own."""

    def forced(i: int) -> Any:
        with ExitStack() as stack:
            for op, found in plan.items():
                stack.enter_context(settings.override(op, **asdict(found)))
            return call(i)

    return forced


def kernel_tasks(jobs: Sequence[tuple[str, Shape]], only: str = "") -> list[ahead.Task]:
    """One for each kernel that only the other plans have, of those whose names have ``only``."""
    found = {
        (SAME_KERNEL.get(kernel, kernel), candidate, ahead.stand_in(candidate, shape))
        for op, shape in jobs
        for name, plan in STEP[op].items()
        for kernel, candidate in plan.items()
        if only in name and candidate.family != "pair"
    }
    return [(ahead.compile_kernel, (*task, "bfloat16")) for task in found]


class Planned(Case):
    """A case whose variants ``plans`` are "fused" with these settings in the place of the plan's own."""

    plans: dict[str, Plan]

    def forward(self, name: str) -> common.Call:
        return under(self.plans[name], super().forward("fused")) if name in self.plans else super().forward(name)

    def step(self, name: str) -> common.Call:
        return under(self.plans[name], super().step("fused")) if name in self.plans else super().step(name)


class Steps(Rows):
    """A run over shapes; all variants are "fused" with other plans, eager and torch.compile."""

    def __init__(
        self,
        peers: Sequence[str],
        device: str = "cuda",
        sets: int | None = None,
        quick: bool = False,
        passes: Sequence[str] = tuple(CANDIDATES),
        only: str = "",
    ) -> None:
        super().__init__(1 if quick else 2)
        self.peers, self.device, self.sets, self.passes, self.only = peers, device, sets, passes, only

    def shape(self, op: str, shape: Shape) -> None:
        case = Planned(op, shape, self.device, self.sets)
        peers = self.added(case, self.peers)
        case.add("fused")
        for pass_ in self.passes:
            others = {name: plan for name, plan in CANDIDATES[pass_][op].items() if self.only in name}
            case.plans = {"plan": {}, **others}
            working, us = self.warmed(case, pass_, [*peers, *case.plans])
            for metric in METRICS:
                self.metric(case, pass_, metric, working, us)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a variant: both times, and their share of the plan's."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    for r in rows:
        key = (r["op"], r["tokens"], r["hidden"], r["intermediate"], r["pass"])
        cells.setdefault(key, {}).setdefault(r["variant"], {})[r["metric"]] = r["median"]
    lines = []
    for (op, tokens, hidden, intermediate, pass_), variants in cells.items():
        lines.append(f"\n{op} {pass_} [{tokens}, {hidden} -> {intermediate}]{'in turn':>30}{'of plan':>9}{'alone':>10}")
        plan = variants.get("plan", {})
        for name, times in variants.items():
            text = "".join(f"{times[m]:11.1f}{times[m] / plan.get(m, times[m]):9.3f}" for m in METRICS if m in times)
            lines.append(f"  {name:46}{text}")
    return "\n".join(lines)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=list(FORWARD), default=["geglu"])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=list(SHAPES), metavar="MxDxH")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compile ahead, in N processes")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no shape after that (default: %(default)s)")
    parser.add_argument("--passes", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--only", default="", metavar="TEXT", help="the other plans whose names have this")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/steps.json)")
    args = parser.parse_args(argv)
    gpu = common.need_gpu()
    begin = time.perf_counter()
    peers = ["eager", "compile"] if args.compile else ["eager"]
    jobs = [(op, shape) for op in args.op for shape in args.shapes]
    if args.jobs > 0:
        names = ["compile", "fused"] if args.compile else ["fused"]
        tasks: list[ahead.Task] = [(ahead.first_calls, (op, shape, names, "bfloat16")) for op, shape in jobs]
        ahead.run([*tasks, *kernel_tasks(jobs, args.only)], args.jobs)
    steps = Steps(peers, quick=args.quick, passes=args.passes, only=args.only)
    ceilings = common.ceilings()
    for op, shape in jobs:
        if time.perf_counter() - begin > args.minutes * 60:
            print(f"not measured in the {args.minutes:g} minutes: {op} {shape} and what follows")
            break
        try:
            steps.shape(op, shape)
        except Exception as error:  # the other shapes are still worth having
            steps.fault(op, shape, "", ["all"], "", error)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{op} {shape}: done at {time.perf_counter() - begin:.0f} s", flush=True)
        if steps.rows:
            common.write(common.result("steps", steps.rows, ceilings, gpu), args.out)
    print(table(steps.rows))
    print("\n".join(f"raised: {what}: {why}" for what, why in steps.raised.items()))
    return 1 if steps.raised or not steps.rows else 0


if __name__ == "__main__":
    sys.exit(main())
