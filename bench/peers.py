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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from bench.case import Case
from bench.rehearsal import Rehearsal, Verdict
from bench.variants import DEFAULT, OPS, VARIANTS, missing, not_offered

Shape = tuple[int, int, int]
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
PHASES = ((("wall_us", "graph_us", "peak_bytes", "saved_bytes", "rel_error"), 0.65), (("kernels", "kernel_us"), 1.0))
METRICS = tuple(m for metrics, _ in PHASES for m in metrics)
WALL_CALLS = 10


def parse_shape(text: str) -> Shape:
    """ "8192x768x3072" -> (8192, 768, 3072)."""
    try:
        tokens, hidden, intermediate = (int(n) for n in text.strip().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shape is TOKENSxHIDDENxINTERMEDIATE, got {text!r}") from None
    if min(tokens, hidden, intermediate) < 1:
        raise argparse.ArgumentTypeError(f"sizes are positive, got {text!r}")
    return tokens, hidden, intermediate


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
    made.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/peers.json)")
    return made


def jobs(args: argparse.Namespace) -> list[tuple[str, Shape]]:
    """(operation, shape), most important first."""
    return [(op, s) for op in args.op for s in (args.shapes or SHAPES[op][: 1 if args.quick else None])]


def measure(case: Case, pass_: str, metric: str, names: Sequence[str], effort: int, us: float) -> dict[str, Any]:
    """variant -> values. effort: 0 to see whether it works, 1 for a look, 2 for results. us: about a call's time."""
    calls = {v: getattr(case, pass_)(v) for v in names}
    if metric == "wall_us":
        rounds = (1, 6, max(8, min(40, int(1.5e6 / (WALL_CALLS * us)))))[effort]
        return common.wall_us(calls, case.sets, rounds, WALL_CALLS)
    if metric == "graph_us":
        return common.graph_us(calls, case.sets, (1, 6, 15)[effort])
    if metric == "kernel_us":
        return common.kernel_us(calls, case.sets, (1, 2, 3)[effort])
    if metric == "peak_bytes":
        return {v: common.peak_bytes(c) for v, c in calls.items()}
    if metric == "saved_bytes":
        return {v: common.saved_bytes(case.keep(v)) for v in names}
    if metric == "kernels":
        return {v: common.kernels(c) for v, c in calls.items()}
    return {v: [case.errors(v)[pass_]] for v in names}


class Run:
    """The rows of a run, and all that has none: what raised, what was left out, what did not fit."""

    def __init__(
        self,
        args: argparse.Namespace,
        rehearsal: Callable[[str, str, Shape], Verdict],
        save: Callable[[list[dict[str, Any]]], None],
        device: str = "cuda",
        sets: int | None = None,
    ) -> None:
        self.args, self.rehearsal, self.save, self.device, self.sets = args, rehearsal, save, device, sets
        self.rows: list[dict[str, Any]] = []
        self.raised: dict[str, str] = {}  # where -> what
        self.marks: set[tuple[Any, ...]] = set()  # the cells of the table that raised
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
        ready = []
        for name in rehearsed:
            try:
                case.add(name)
                ready.append(name)
            except Exception as error:
                self.fault(op, shape, "", [name], "build", error)
        for pass_ in PASSES:
            if self.seconds() > end:
                self.unmeasured.append(f"{op} {'x'.join(map(str, shape))} {pass_}: {', '.join(metrics)}")
                continue
            working, us = [], 1.0
            for name in ready:
                try:
                    us = max(us, case.warm_up(getattr(case, pass_)(name)))
                    working.append(name)
                except Exception as error:
                    self.fault(op, shape, pass_, [name], "warm-up", error)
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

    def metric(self, case: Case, pass_: str, metric: str, names: Sequence[str], us: float) -> None:
        """Measures all variants in turn; where one raises, finds out which, and measures the others."""
        effort = 1 if self.args.quick else 2
        found: dict[str, Any] = {}
        left = list(names)
        for last in (False, True):
            if not left:
                break
            try:
                found = measure(case, pass_, metric, left, effort, us)
                break
            except Exception as error:
                guilty = [] if last else self.alone(case, pass_, metric, left, us)
                if not guilty:  # it takes all of them
                    self.fault(case.op, case.shape, pass_, left, metric, error)
                    break
                left = [v for v in left if v not in guilty]
        for name, values in found.items():
            try:
                options = {"bias": OPS[case.op].bias}
                self.rows.append(common.row(case.op, pass_, case.shape, name, metric, values, **options))
            except common.BenchError as error:
                self.fault(case.op, case.shape, pass_, [name], metric, error)

    def alone(self, case: Case, pass_: str, metric: str, names: Sequence[str], us: float) -> list[str]:
        guilty = []
        for name in names:
            try:
                measure(case, pass_, metric, [name], 0, us)
            except Exception as error:
                self.fault(case.op, case.shape, pass_, [name], metric, error)
                guilty.append(name)
        return guilty

    def fault(self, op: str, shape: Shape, pass_: str, names: Sequence[str], what: str, error: Exception | str) -> None:
        if isinstance(error, Exception):
            traceback.print_exception(error, limit=-8, file=sys.stderr)
            lines = str(error).strip().splitlines()
            error = f"{type(error).__name__}: {lines[0] if lines else ''}"
        place = " ".join([op, "x".join(map(str, shape)), pass_]).strip()
        for name in names:
            self.raised[f"{name}, {place}, {what}"] = error
            self.marks.add((op, shape, pass_, what if what in METRICS else "", name))

    def failed(self, op: str, shape: Shape, pass_: str, metric: str, name: str) -> bool:
        return any((op, shape, p, m, name) in self.marks for p in (pass_, "") for m in (metric, ""))

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


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        gpu = common.need_gpu()
    except common.BenchError as error:
        print(f"bench/peers.py: {error}", file=sys.stderr)
        return 2
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
