"""fusedmlp and its peers in bfloat16: eager PyTorch, torch.compile, Liger, quack and flash-swiglu-mlp, in one run.

    python bench/peers.py                      all default shapes, 8 minutes; bench/results/<gpu>/peers.json
    python bench/peers.py --op geglu --shapes 8192x768x3072,128x768x3072 --variants eager fused --metrics wall_us
    python bench/peers.py --quick              the first shape of each operation, fewer repeats; writes only with --out

A step is a forward and a backward with a random upstream gradient; x requires a gradient, gradients start as None.
All variants of a shape take turns on the same input sets, which are larger than the L2 cache. A peer that is not
installed, or has no such operation, is named as left out. A variant that raises is named, and the others go on.
Kernel times and graph replays are those of sustained load: see bench/common.py and fusedmlp/tune/timing.py.

Some first calls tune for minutes (quack, compile_max). Another process makes them, for --peer-seconds a shape, and
leaves what it found in the peers' own caches: see rehearsal.py. quack takes its default settings instead where that
time was too short, and is called quack_untuned in those rows.

Shapes run in the order given. The clock comes first for all of them, then the profiler, which stays attached once
used. Where --minutes are over, what was not measured is named. The file is written after each shape.

Exit code: 0; 1 where a variant raised or nothing was measured; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ahead, common
from bench.case import Case, Shape
from bench.case import parse_shape as parse_shape
from bench.rehearsal import Rehearsal, Verdict
from bench.rows import Rows
from bench.script import script
from bench.variants import DEFAULT, OPS, VARIANTS, missing, not_offered

SHAPES: dict[str, tuple[Shape, ...]] = {
    "geglu": (
        (8192, 768, 3072),
        (1024, 768, 3072),
        (128, 768, 3072),
        (8192, 2304, 9216),
        (1024, 2304, 9216),
        (8192, 4096, 14336),
    ),
    "mlp_relu": ((8192, 768, 3072), (8192, 1024, 4096)),
    "swiglu": ((8192, 768, 3072), (1024, 4096, 11008)),
}
PASSES = ("forward", "step")
# Everything by the clock, then what needs the profiler; and the part of the time after which no more of it is begun.
_PROFILED = ("kernels", "kernel_us", "kernel_alone_us")
PHASES = ((("wall_us", "graph_us", "peak_bytes", "saved_bytes", "rel_error"), 0.65), (_PROFILED, 1.0))
METRICS = tuple(m for metrics, _ in PHASES for m in metrics)


def parse_shapes(text: str) -> list[Shape]:
    return [parse_shape(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--op", nargs="+", choices=list(OPS), default=list(SHAPES), help="default: all, in this order")
    made.add_argument("--shapes", type=parse_shapes, metavar="TxDxH,...", help="instead of each operation's own")
    made.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(DEFAULT))
    made.add_argument("--metrics", nargs="+", choices=METRICS, default=list(METRICS))
    made.add_argument("--quick", action="store_true", help="one shape, fewer repeats; for a look, not for results")
    made.add_argument("--minutes", type=float, default=8.0, help="begin nothing after that (default: %(default)s)")
    made.add_argument(
        "--peer-seconds", type=float, default=60.0, help="for the first calls of a peer at a shape (%(default)s)"
    )
    made.add_argument("--jobs", type=int, default=0, metavar="N", help="first calls ahead, in N processes")
    made.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/peers.json)")
    return made


def jobs(args: argparse.Namespace) -> list[tuple[str, Shape]]:
    """(operation, shape), most important first."""
    return [(op, s) for op in args.op for s in (args.shapes or SHAPES[op][: 1 if args.quick else None])]


def compile_ahead(args: argparse.Namespace) -> None:
    """First calls of the variants that do not tune, each shape in a process: largest first, which take longest."""
    tasks: list[ahead.Task] = []
    for op, shape in sorted(jobs(args), key=lambda job: -job[1][0]):
        quick = (v for v in args.variants if not VARIANTS[v].rehearse and not missing(v) and not_offered(v, op) is None)
        tasks.append((ahead.first_calls, (op, shape, list(quick), "bfloat16")))
    ahead.run(tasks, args.jobs)


class Run(Rows):
    """A run over all shapes."""

    def __init__(
        self,
        args: argparse.Namespace,
        rehearsal: Callable[[str, str, Shape], Verdict],
        save: Callable[[list[dict[str, Any]]], None],
        device: str = "cuda",
        sets: int | None = None,
    ) -> None:
        super().__init__(1 if args.quick else 2)
        self.args, self.rehearsal, self.save, self.device, self.sets = args, rehearsal, save, device, sets
        self.left_out: dict[str, str] = {}
        self.unmeasured: list[str] = []
        self.begin = time.perf_counter()
        todo = jobs(args)
        self.reference = {op: min((s for o, s in todo if o == op), key=lambda s: s[0] * s[1] * s[2]) for op, _ in todo}
        for name in args.variants:
            if reason := missing(name):
                self.left_out[name] = reason
        self.present = [v for v in args.variants if v not in self.left_out]

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def all(self) -> None:
        chosen = [([m for m in metrics if m in self.args.metrics], share) for metrics, share in PHASES]
        chosen = [(metrics, share) for metrics, share in chosen if metrics]
        for k, (metrics, share) in enumerate(chosen):
            end = self.args.minutes * 60 * (share if k + 1 < len(chosen) else 1.0)
            for op, shape in jobs(self.args):
                where = f"{op} {'x'.join(map(str, shape))}"
                if self.seconds() > end:
                    self.unmeasured.append(f"{where}: {', '.join(metrics)}")
                    continue
                try:
                    self.shape(op, shape, metrics, end)
                except Exception as error:  # the other shapes are still worth having
                    self.fault(op, shape, "", self.present, ", ".join(metrics), error)
                gc.collect()
                if self.device == "cuda":
                    torch.cuda.empty_cache()
                if self.rows:
                    self.save(self.rows)
                print(f"{where}, {', '.join(metrics)}: done at {self.seconds():.0f} s", flush=True)

    def shape(self, op: str, shape: Shape, metrics: Sequence[str], end: float) -> None:
        """Measures these metrics of both passes, and appends their rows."""
        rehearsed = self.rehearsed(op, shape)
        case = Case(op, shape, self.device, self.sets)
        ready = self.added(case, rehearsed)
        for pass_ in PASSES:
            if self.seconds() > end:
                self.unmeasured.append(f"{op} {'x'.join(map(str, shape))} {pass_}: {', '.join(metrics)}")
                continue
            working, us = self.warmed(case, pass_, ready)
            for metric in metrics:
                if self.wanted(op, shape, pass_, metric):
                    self.metric(case, pass_, metric, working, us)

    def wanted(self, op: str, shape: Shape, pass_: str, metric: str) -> bool:
        if metric == "rel_error":  # float64 is slow, and errors depend little on the shape
            return shape == self.reference[op]
        return metric != "saved_bytes" or pass_ == "step"

    def rehearsed(self, op: str, shape: Shape) -> list[str]:
        """The variants that can run here, after their first calls in another process."""
        names = []
        for name in self.present:
            if reason := not_offered(name, op):
                self.left_out[f"{name}, {op}"] = reason
                continue
            tried: str | None = name
            while tried is not None and VARIANTS[tried].rehearse:
                verdict = self.rehearsal(tried, op, shape)
                if verdict.ok:
                    break
                if verdict.timed_out:
                    self.left_out[f"{tried}, {op} {'x'.join(map(str, shape))}"] = verdict.reason
                    tried = VARIANTS[tried].instead
                else:
                    self.fault(op, shape, "", [tried], "first calls", verdict.reason)
                    tried = None
            if tried is not None and tried not in names:
                names.append(tried)
        return names

    def table(self) -> str:
        """The run as aligned text, and under it what it does not hold, with the reasons."""
        cells = {
            (r["op"], (r["tokens"], r["hidden"], r["intermediate"]), r["pass"], r["metric"], r["variant"]): r["median"]
            for r in self.rows
        }
        order = jobs(self.args)
        keys = sorted(
            {k[:4] for k in cells}, key=lambda k: (order.index(k[:2]), PASSES.index(k[2]), METRICS.index(k[3]))
        )
        seen = {k[4] for k in cells} | {m[4] for m in self.marks}
        variants = [v for v in VARIANTS if v in seen]
        lines = [f"{'op':9}{'shape':>16} {'pass':8}{'metric':12}" + "".join(f"{v:>14}" for v in variants)]
        for key in keys:
            text = ""
            for v in variants:
                value = cells.get((*key, v))
                shown = "-" if value is None else f"{value:.5g}" if value < 1e5 else f"{value:.0f}"
                text += f"{'raised' if value is None and self.failed(*key, v) else shown:>14}"
            lines.append(f"{key[0]:9}{'x'.join(map(str, key[1])):>16} {key[2]:8}{key[3]:12}{text}")
        lines += [f"left out: {what}: {why}" for what, why in self.left_out.items()]
        lines += [f"raised: {what}: {why}" for what, why in self.raised.items()]
        lines += [f"not measured in the {self.args.minutes:g} minutes: {what}" for what in self.unmeasured]
        return "\n".join(lines)


@script
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    gpu = common.need_gpu()
    if args.jobs > 0:
        compile_ahead(args)
    ceilings = common.ceilings()
    written: list[Path] = []

    def save(rows: list[dict[str, Any]]) -> None:
        if args.out or not args.quick:
            written[:] = [common.write(common.result("peers", rows, ceilings, gpu), args.out)]

    with Rehearsal(args.peer_seconds) as rehearsal:
        run = Run(args, rehearsal, save)
        run.all()
    versions = common.result("peers", run.rows, ceilings, gpu)
    print(f"\n{gpu}, driver {versions['driver']}, {versions['packages']}, torch {versions['torch']}; {ceilings}")
    print(run.table())
    for path in written:
        print(f"written: {path}")
    return 1 if run.raised or not run.rows else 0


if __name__ == "__main__":
    sys.exit(main())
