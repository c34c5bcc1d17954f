"""Host time of a call and of a training step, and small batches at the bandwidth of the memory.

    python bench/host.py               under 100 s on an H200; bench/results/<gpu>/host.json
    python bench/host.py --breakdown   prints what the parts of a call cost the host, and measures nothing else
    FUSEDMLP_LAUNCHER=triton python bench/host.py    without the compiled launcher; host-triton.json

All variants compute on the same inputs and weights, take turns, and are checked against eager. The sets of weights
that take turns are larger than the L2 cache, so that a launch also sees other addresses than the one before it; the
ReLU stack has one set, since graphs of torch.compile are recorded anew where modules take turns. PyTorch runs the
backward of CUDA tensors in a thread of its own: variants called ``..._same_thread`` run with
``torch.autograd.set_multithreading_enabled(False)``, and are compared among themselves.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from bench.case import Case
from bench.script import script
from fusedmlp import FusedReLUMLP

ONE = (1, 768, 3072)
STEP = (128, 768, 3072)
STACK = (128, 1024, 1024)
WIDTHS = ((768, 3072), (2304, 9216), (4096, 14336))
DECODE = tuple((tokens, *widths) for widths in WIDTHS for tokens in (1, 16, 64))
SAME_THREAD = "_same_thread"
MOST_ERROR = 2e-2  # relative difference from eager in 16 bits, far above rounding
Shape = tuple[int, int, int]
Rows = list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------ what is asked for


@dataclass(frozen=True)
class Limit:
    """The median of ``variant`` is at most ``share`` of that of ``against``, in one cell."""

    what: str
    op: str
    pass_: str
    shape: Shape
    metric: str
    variant: str
    against: str
    share: float


def _step(what: str, against: str, share: float, mode: str = "") -> Limit:
    return Limit(what, "geglu", "step", STEP, "wall_us", f"fused{mode}", f"{against}{mode}", share)


def _stack(against: str, share: float) -> Limit:
    what = "ReLU stack 3 x 1024, batch 128, fp16, wall"
    return Limit(what, "relu_mlp", "forward", STACK, "wall_us", "fused", against, share)


FORWARD = Limit("GeGLU forward, no grad, M=1, host", "geglu", "forward", ONE, "host_us", "fused", "eager", 0.35)
LIMITS = (
    FORWARD,
    Limit("GeGLU forward with grad, M=1, host", "geglu", "forward", ONE, "host_us", "fused_grad", "eager_grad", 0.40),
    _step("GeGLU step, M=128, wall", "eager", 0.25),
    _step("the same, backward in the calling thread", "eager", 0.30, SAME_THREAD),
    _step("GeGLU step, M=128, wall", "compile", 0.20),
    _stack("eager", 0.50),
    _stack("compile_reduce_overhead", 1.00),
    *(
        Limit(
            f"GeGLU decode {s[1]} -> {s[2]}, M={s[0]}, graph", "geglu", "forward", s, "graph_us", "fused", "eager", most
        )
        for s, most in [(s, {(1, 768): 0.56, (1, 4096): 0.88}.get(s[:2], 1.00)) for s in DECODE]
    ),
)
TRITON_LIMITS = (Limit(FORWARD.what, *("geglu", "forward", ONE, "host_us", "fused", "eager"), share=0.65),)
READ_SHARE = 0.90  # of the read bandwidth of the run, by the weights alone, at M=1 and the largest width


def table(rows: Rows, limits: Sequence[Limit], ceilings: dict[str, float]) -> tuple[str, int]:
    """The limits as aligned text, and how many of them do not hold or were not measured."""
    cells = {
        (r["op"], r["pass"], (r["tokens"], r["hidden"], r["intermediate"]), r["metric"], r["variant"]): r for r in rows
    }
    lines = [f"{'':50}{'against':>28}{'':>10}{'ours':>10}{'low':>9}{'high':>9}{'share':>8}{'at most':>9}"]
    missed = 0
    for limit in limits:
        place = (limit.op, limit.pass_, limit.shape, limit.metric)
        ours, theirs = cells.get((*place, limit.variant)), cells.get((*place, limit.against))
        head = f"{limit.what:50}{limit.against:>28}"
        if ours is None or theirs is None:
            missed += 1
            lines.append(f"{head}  not measured")
            continue
        share = ours["median"] / theirs["median"]
        holds = share <= limit.share
        missed += not holds
        numbers = f"{theirs['median']:>10.1f}{ours['median']:>10.1f}{ours['low']:>9.1f}{ours['high']:>9.1f}"
        lines.append(f"{head}{numbers}{share:>8.2f}{limit.share:>9.2f}  {'holds' if holds else 'MISSED'}")
    for mode in ("", SAME_THREAD):
        least, theirs = (cells.get(("geglu", "step", STEP, "wall_us", f"{v}{mode}")) for v in ("nothing", "eager"))
        if least is not None and theirs is not None:
            share = least["median"] / theirs["median"]
            lines.append(
                f"a step of a Function that computes nothing{mode}: {least['median']:.1f}, {share:.2f} of eager"
            )
    tokens, hidden, intermediate = DECODE[-3]
    largest = cells.get(("geglu", "forward", (tokens, hidden, intermediate), "graph_us", "fused"))
    if largest is not None:
        speed = 2 * 3 * hidden * intermediate / (largest["median"] * 1e-6) / 1e12
        share = speed / ceilings["read_tb_s"]
        missed += share < READ_SHARE
        held = "holds" if share >= READ_SHARE else "MISSED"
        lines.append(
            f"weights of {hidden} -> {intermediate} read at {speed:.2f} TB/s, {share:.3f} of the "
            f"{ceilings['read_tb_s']} of this run; at least {READ_SHARE:.2f}: {held}"
        )
    return "\n".join(lines), missed


# ------------------------------------------------------------------------------------------------ the measurements


def in_calling_thread() -> AbstractContextManager[Any]:
    """Backwards run in the thread that calls them."""
    return torch.autograd.set_multithreading_enabled(False)  # type: ignore[attr-defined,no-any-return]


def check(name: str, what: str, error: float) -> None:
    if error > MOST_ERROR:
        raise common.BenchError(f"{name}: relative error {error:.1e} of {what}")


def check_forward(case: Case, calls: dict[str, common.Call]) -> None:
    """Raises BenchError where the output of a variant is not eager's."""
    with torch.no_grad():
        exact = calls["eager"](0).double()
        for name, call in calls.items():
            check(name, f"a forward at {case.shape}", common.relative_error(call(0), exact))


def _geglu(shape: Shape, variants: Sequence[str]) -> Case:
    case = Case("geglu", shape)
    for name in variants:
        case.add(name)
    return case


def forward_rows(variants: Sequence[str], scale: int) -> Rows:
    """Host time of a module call, without and with gradients."""
    rows: Rows = []
    case = _geglu(ONE, variants)
    calls = {v: case.keep(v) for v in variants}
    for suffix, mode in (("", torch.no_grad), ("_grad", torch.enable_grad)):
        with mode():
            for call in calls.values():
                case.warm_up(call)
            found = common.host_us(calls, case.sets, 60 // scale)
        rows += [common.row("geglu", "forward", ONE, v + suffix, "host_us", t) for v, t in found.items()]
    check_forward(case, calls)
    return rows


class Nothing(torch.autograd.Function):
    """What PyTorch itself takes for an operation in Python with a gated layer's operands: it only allocates results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple([torch.empty_like(t) for t in ctx.saved_tensors])


def nothing_step(case: Case) -> common.Call:
    """A training step of :class:`Nothing`: no step of a Function in Python can be shorter."""
    leaves = [[x, *built.parameters] for x, built in zip(case.x, case.built["eager"], strict=True)]

    def call(i: int) -> None:
        torch.autograd.backward(Nothing.apply(*leaves[i]), case.dy[i])
        for leaf in leaves[i]:
            leaf.grad = None

    return call


def step_rows(variants: Sequence[str], scale: int) -> Rows:
    """Wall clock and host time of a training step, and of one that does nothing, in both threads."""
    rows: Rows = []
    case = _geglu(STEP, variants)
    calls = {v: case.step(v) for v in variants} | {"nothing": nothing_step(case)}
    for suffix, mode in (("", nullcontext), (SAME_THREAD, in_calling_thread)):
        with mode():
            for call in calls.values():
                case.warm_up(call)
            for metric, meter in (("wall_us", common.wall_us), ("host_us", common.host_us)):
                found = meter(calls, case.sets, 40 // scale, 10)
                rows += [common.row("geglu", "step", STEP, v + suffix, metric, t) for v, t in found.items()]
    for name in variants:
        for pass_, error in case.errors(name).items():
            check(name, f"a {pass_} at {STEP}", error)
    return rows


def stack_rows(variants: Sequence[str], scale: int) -> Rows:
    """Wall clock of the forward of three layers of Linear and ReLU."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    tokens, width, _ = STACK
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    eager = nn.Sequential(*layers).to("cuda", torch.float16)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.float16)
    modules = {
        "eager": lambda: eager,
        "compile": lambda: torch.compile(eager),
        "compile_reduce_overhead": lambda: torch.compile(eager, mode="reduce-overhead"),
        "fused": lambda: FusedReLUMLP.from_module(eager),
    }
    built: dict[str, Any] = {v: modules[v]() for v in variants}
    calls: dict[str, common.Call] = {v: lambda i, module=module: module(x) for v, module in built.items()}
    rows: Rows = []
    with torch.no_grad():
        exact = eager(x).double()
        for name, call in calls.items():
            for _ in range(5):
                call(0)
            check(name, "the ReLU stack", common.relative_error(call(0), exact))
        for metric, meter in (("wall_us", common.wall_us), ("host_us", common.host_us)):
            found = meter(calls, 1, 60 // scale, 10)
            for v, values in found.items():
                rows.append(common.row("relu_mlp", "forward", STACK, v, metric, values, dtype="float16", bias=True))
    return rows


def decode_rows(shape: Shape, variants: Sequence[str], scale: int) -> Rows:
    """A forward of few tokens out of a CUDA graph: the device's time, with the gaps between launches."""
    case = _geglu(shape, variants)
    calls = {v: case.forward(v) for v in variants}
    for call in calls.values():
        case.warm_up(call)
    found = common.graph_us(calls, case.sets, 20 // scale)
    check_forward(case, calls)
    return [common.row("geglu", "forward", shape, v, "graph_us", t) for v, t in found.items()]


def cells(triton: bool, scale: int) -> dict[str, Callable[[], Rows]]:
    """What is measured, by name. ``triton``: without the compiled launcher, where only the host's side differs."""
    three = ("eager", "compile", "fused")
    if triton:
        two = ("eager", "fused")
        return {"forward": lambda: forward_rows(two, scale), "step": lambda: step_rows(two, scale)}
    found: dict[str, Callable[[], Rows]] = {
        "forward": lambda: forward_rows(three, scale),
        "step": lambda: step_rows(three, scale),
        "stack": lambda: stack_rows(("eager", "compile", "compile_reduce_overhead", "fused"), scale),
    }
    for shape in DECODE:
        found[f"decode {shape}"] = lambda shape=shape: decode_rows(shape, ("eager", "fused"), scale)
    return found


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the repeats; for a look, not for results")
    parser.add_argument("--breakdown", action="store_true", help="print what the parts of a call cost the host")
    parser.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/host.json)")
    args = parser.parse_args(argv)
    gpu = common.need_gpu()
    if args.breakdown:
        from bench import breakdown

        print(breakdown.report())
        return 0
    triton = os.environ.get("FUSEDMLP_LAUNCHER") == "triton"
    begin = time.perf_counter()
    ceilings = common.ceilings()
    rows: Rows = []
    failed = 0
    for name, measure in cells(triton, 4 if args.quick else 1).items():
        try:
            rows += measure()
        except Exception:  # the other cells are still worth having
            failed += 1
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: done at {time.perf_counter() - begin:.0f} s", flush=True)
    if not rows:
        return 1
    from fusedmlp import launch

    content = common.result("host-triton" if triton else "host", rows, ceilings, gpu)
    text, missed = table(rows, TRITON_LIMITS if triton else LIMITS, ceilings)
    versions = f"torch {content['torch']}, triton {content['triton']}"
    print(f"\n{gpu}, {versions}, launches by {launch.path()}; {ceilings}\n{text}")
    print(f"limits that do not hold: {missed}; measurements that failed: {failed}")
    if args.out or not args.quick:
        print(f"written: {common.write(content, args.out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
