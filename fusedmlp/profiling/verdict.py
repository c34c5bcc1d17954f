"""Whether a step is launch-bound, compute-bound or memory-bound, with the numbers behind the word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .names import decode
from .names.gemm import BESIDE
from .trace.model import Work
from .trace.stats import StepStats
from .trace.tokens import _compute_op, _itemsize, batch, product_dims

LAUNCH_BOUND = 0.25  # of a step's device time spent waiting for the host
_COMPUTE = {"gemm", "convolution", "attention"}
_TRAFFIC = {"elementwise", "copy", "fill", "reduction", "norm", "softmax", "index", "optimizer", "random", "loss"}


@dataclass(frozen=True)
class Product:
    """One matrix product, or a batch of them. M, N, K: its sizes, the rows of a batch in M. us: device time. flop,
    bytes: what it has to compute and to move at least (each operand once). batch: matrices of the second operand."""

    name: str
    M: int
    N: int
    K: int
    itemsize: int
    us: float
    batch: int = 1

    @property
    def flop(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        return self.itemsize * (self.M * self.K + self.batch * self.N * self.K + self.M * self.N)

    @property
    def tflop_s(self) -> float:
        return self.flop / self.us / 1e6 if self.us else 0.0

    @property
    def tb_s(self) -> float:
        return self.bytes / self.us / 1e6 if self.us else 0.0


@dataclass(frozen=True)
class Verdict:
    """word: "launch-bound", "compute-bound", "memory-bound", or "undecided" where no kernel is of either kind. why: the
    numbers, one sentence."""

    word: str
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def products(work: Iterable[Work]) -> list[Product]:
    """The products among some kernels whose sizes the profile recorded, one for each launch."""
    found = []
    for w in work:
        name = decode(w.name)
        if w.kind != "kernel" or name.family != "gemm" or name.details.get("role") in BESIDE:
            continue
        op = _compute_op(w.op)
        dims, size = product_dims(op), _itemsize(op)
        if dims and size:
            found.append(Product(w.name, *dims, size, w.duration, batch(op)))
    return found


def judge(step: StepStats, work: Sequence[Work], ceilings: dict[str, float] | None = None) -> Verdict:
    """The verdict on a step.

    ceilings: ``gemm_tflop_s`` and ``copy_tb_s`` that the card reaches, measured; without them the achieved rates alone
    are told, and the word follows from where the kernel time goes.
    """
    span = step.span_us
    if not step.kernels or not span:
        return Verdict("no kernels", "the device ran nothing in this step")
    waiting = step.waiting_us / span
    if waiting >= LAUNCH_BOUND:
        each = step.host_us / step.kernels
        return Verdict(
            "launch-bound",
            f"the device waits for the host {waiting:.0%} of {span:.0f} us; the host needs {each:.1f} us a kernel, "
            f"a kernel takes {step.kernel_us / step.kernels:.1f} us",
        )
    found = products(work)
    busy = step.kernel_us or 1.0
    kernels = [w for w in work if w.kind == "kernel"]
    share, compute, traffic = (
        sum(w.duration for w in kernels if decode(w.name).family in families) / busy
        for families in ({"gemm"}, _COMPUTE, _TRAFFIC)
    )
    others = f", convolutions and attention {compute - share:.0%}" if compute > share else ""
    head = f"products take {share:.0%} of kernel time{others}, elementwise work, copies and reductions {traffic:.0%}"
    word = "memory-bound" if traffic > compute else "compute-bound" if compute else "undecided"
    us = sum(p.us for p in found)
    if not us:
        return Verdict(word, head)
    rate, speed = sum(p.flop for p in found) / us / 1e6, sum(p.bytes for p in found) / us / 1e6
    known = "" if us / busy > share - 0.01 else f" (those whose sizes are known, {us / busy:.0%})"
    head += f"; products{known} run at {rate:.0f} TFLOP/s and {speed:.2f} TB/s"
    if not ceilings:
        return Verdict(word, head)
    top, wire = ceilings["gemm_tflop_s"], ceilings["copy_tb_s"]
    head += f" of this card's {top:.0f} and {wire:.2f}"
    memory = sum(p.us for p in found if p.bytes / wire > p.flop / top) / busy + traffic
    return Verdict("memory-bound" if memory > 0.5 else "compute-bound", head)
