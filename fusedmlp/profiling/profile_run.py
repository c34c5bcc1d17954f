"""Run the variants of a workload: guess, record a trace, read it, compare."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .guess import Guess, guess_compiled, guess_eager, guess_fused
from .host_counts import count_on_host
from .record import record_trace
from .trace.load import load
from .trace_report import TraceReport
from .verdict import Product, Verdict, judge, products
from .workloads import Variant, Workload, variant

PASSES = ("forward", "step")
FIRST_CALLS = 4  # compilation, cuBLAS workspaces, the allocator's pools
BLOCKS, BLOCK = 7, 10  # of calls, for the host's time


@dataclass(frozen=True)
class Result:
    """One variant and pass. seen: kernels of a step, without ``split`` reductions of products that cuBLAS split along
    K, which no guess knows of; None of compiled code without a device. host_us: of the host for a call, without a
    profiler. trace: the file."""

    variant: str
    pass_: str
    guess: Guess
    seen: int | None
    split: int
    host_us: float
    report: TraceReport
    verdict: Verdict
    trace: Path

    @property
    def mark(self) -> str:
        """ "equal", or by how much the guess is off."""
        if self.seen is None:
            return "not seen"
        off = self.seen - self.guess.kernels
        return "equal" if off == 0 else f"{off:+d}"

    def differences(self) -> list[str]:
        """What was guessed and what was seen, in order, where they differ."""
        if self.mark == "equal":
            return []
        guessed = ", ".join(self.guess.parts) or "nothing"
        seen = ", ".join(_word(w.name) for w in self.report.work if w.kind == "kernel") or "nothing"
        return [f"guessed: {guessed}", f"seen: {seen}"]


def _word(name: str) -> str:
    from .names import decode

    return decode(name).text


def _role(name: str) -> str:
    from .names import decode

    return decode(name).details.get("role", "")


@dataclass(frozen=True)
class Ceilings:
    """What this card reaches: TFLOP/s of an 8192 cubed product, TB/s of a copy (bytes read and written)."""

    gemm_tflop_s: float
    copy_tb_s: float

    def as_dict(self) -> dict[str, float]:
        return {"gemm_tflop_s": self.gemm_tflop_s, "copy_tb_s": self.copy_tb_s}


def measure_ceilings(dtype: torch.dtype) -> Ceilings:
    """Measure the current CUDA device for a second or so; products in ``dtype`` as PyTorch is set to compute them."""
    from ..tune.timing import events_us

    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    n = 8192 if dtype.itemsize == 2 else 4096
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    found = []
    for fn, amount in ((lambda: a @ b, 2 * n**3), (lambda: target.copy_(source), 2 * source.nbytes)):
        events_us(fn, 5)
        found.append(amount / statistics.median(events_us(fn, 20)) / 1e6)
    return Ceilings(round(found[0], 1), round(found[1], 3))


def host_us(call: Callable[[], Any]) -> float:
    """Time that the host takes to issue a call, in microseconds: the median of blocks that begin with an idle device
    and do not wait for it."""
    times = []
    for _ in range(BLOCKS):
        _synchronize()
        begin = time.perf_counter()
        for _ in range(BLOCK):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / BLOCK)
    _synchronize()
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def guesses(workload: Workload, chosen: Variant, pass_: str) -> Guess:
    """The guess for a variant and pass, made from the eager module for what is compiled, and from this package's own
    layer for one from the Hub."""
    call = getattr(chosen, pass_)
    if chosen.kind in ("fused", "hub"):
        return guess_fused(call if chosen.kind == "fused" else getattr(variant(workload, "fused"), pass_))
    if chosen.kind == "eager":
        return guess_eager(call)
    eager = variant(workload, "eager")
    return guess_compiled(eager.forward, eager.step if pass_ == "step" else None)


def run_variant(
    workload: Workload, chosen: Variant, pass_: str, guess: Guess, out: Path, ceilings: Ceilings | None
) -> Result:
    """Record and read one trace. Without a CUDA device the trace is of the host alone, and ``seen`` what it
    dispatched."""
    call = getattr(chosen, pass_)
    for _ in range(FIRST_CALLS):
        call()
    us = host_us(call)
    path = record_trace(call, out / trace_name(workload, chosen, pass_))
    report = TraceReport(load(path))
    kernels = [w for w in report.work if w.kind == "kernel"]
    split = sum(_role(w.name).startswith("splitK") for w in kernels)
    seen: int | None = len(kernels) - split
    if not torch.cuda.is_available():
        seen = None if chosen.kind == "compile" else count_on_host(call).kernels
    verdict = judge(report.stats.steps[report.step], report.work, ceilings.as_dict() if ceilings else None)
    return Result(chosen.name, pass_, guess, seen, split, us, report, verdict, path)


def trace_name(workload: Workload, chosen: Variant, pass_: str) -> str:
    """A file name that says what is in it: card, workload, variant, pass."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    words = (device.lower().removeprefix("nvidia "), workload.name, chosen.name, pass_)
    return "-".join(re.sub(r"[^a-z0-9]+", "-", w.lower()).strip("-") for w in words) + ".json.gz"


def product_rows(results: Sequence[Result]) -> list[tuple[str, Product]]:
    """Each product of each result whose sizes are known, with the variant and pass it is of; equal ones once."""
    rows: dict[tuple[Any, ...], tuple[str, Product]] = {}
    for r in results:
        for p in products(r.report.work):
            rows.setdefault((r.variant, r.pass_, p.name, p.M, p.N, p.K), (f"{r.variant} {r.pass_}", p))
    return list(rows.values())


def whole_passes(results: Sequence[Result]) -> list[tuple[Result, int, float, float]]:
    """Each result with the FLOP of all products of its pass, its kernel time in microseconds, and their TFLOP/s.

    The FLOP are counted at the eager variant, whose products all have their sizes in the profile; without it, nothing.
    """
    flop = {r.pass_: sum(p.flop for p in products(r.report.work)) for r in results if r.variant == "eager"}
    found = []
    for r in results:
        us = r.report.stats.steps[r.report.step].kernel_us
        if flop.get(r.pass_) and us:
            found.append((r, flop[r.pass_], us, flop[r.pass_] / us / 1e6))
    return found
