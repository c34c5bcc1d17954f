"""What ``explain`` says of a trace: as a dictionary for JSON, and in the terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .tables import show_table
from .trace.chains import ChainGroup, find_chains, grouped
from .trace.model import Trace, Work
from .trace.stats import TraceStats, analyse
from .verdict import Verdict, judge, products


class TraceReport:
    """Everything that is known of a trace. ``step``: the index of the step that chains and verdict are about, the one
    of median kernel time."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.stats: TraceStats = analyse(trace)
        order = sorted(range(len(trace.steps)), key=lambda i: self.stats.steps[i].kernel_us)
        self.step = order[len(order) // 2]
        self.work: list[Work] = trace.by_step().get(self.step, [])
        self.chains: list[ChainGroup] = grouped(find_chains(self.work))
        self.verdict: Verdict = judge(self.stats.steps[self.step], self.work)

    @property
    def device(self) -> str:
        names = [str(d.get("name", "")) for d in self.trace.devices]
        return ", ".join(dict.fromkeys(n for n in names if n)) or "unknown device"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain values only; times in microseconds, bytes in bytes."""
        stats = asdict(self.stats)
        stats["kernels"] = [asdict(k) for k in self.stats.kernels]
        chains = []
        for group in self.chains:
            chain = {k: v for k, v in vars(group.chain).items() if k != "work"}
            chain |= {"us": group.chain.us, "kernels": [w.name for w in group.chain.work]}
            chains.append(chain | {"count": group.count, "saved": group.saved, "bytes_saved_step": group.bytes_saved})
        found = [asdict(p) | {"tflop_s": p.tflop_s, "tb_s": p.tb_s} for p in products(self.work)]
        return {
            "trace": self.trace.path,
            "device": self.device,
            "events": self.trace.events,
            "step": self.trace.steps[self.step].name,
            "verdict": asdict(self.verdict),
            **stats,
            "chains": chains,
            "products": found,
        }

    def show(self, top: int = 12) -> None:
        """Print the report; ``top``: rows of the kernel tables."""
        _show_head(self)
        _show_steps(self.stats)
        _show_kernels(self.stats, top)
        _show_waits(self.stats, top)
        _show_chains(self)


def _show_head(report: TraceReport) -> None:
    trace, stats = report.trace, report.stats
    print(f"{trace.path}: {trace.events} events, {report.device}, {stats.devices} devices, {stats.streams} streams")
    if not stats.kernels:
        print("No device kernels: a profile of the host alone, or one whose device side was lost. Record it with")
        print("ProfilerActivity.CUDA among the activities, on the machine that has the GPU.")
        return
    print(f"{report.verdict} ({trace.steps[report.step].name})")
    idle = stats.idle_us / max(stats.busy_us + stats.idle_us, 1e-9)
    print(
        f"device busy {stats.busy_us:.0f} us, idle {stats.idle_us:.0f} us ({idle:.0%}); {stats.launches} launches, "
        f"a call takes the host {stats.launch_call_us:.1f} us, work starts {stats.launch_delay_us:.1f} us after it "
        "(medians)"
    )
    print(
        f"{stats.small_kernels} kernels are shorter than 5 us, {stats.small_us:.0f} us in all; "
        f"names decoded for {stats.named_share:.1%} of kernel time"
    )
    if stats.graph_launches:
        print(f"{stats.graph_launches} CUDA graph launches")
    if stats.occupancy_queries:
        print(f"{stats.occupancy_queries} occupancy queries, {stats.occupancy_query_us:.0f} us of the host")


def _show_steps(stats: TraceStats) -> None:
    if not stats.kernels:
        return
    columns = ("step", "kernels", "memcpy", "memset", "host us", "kernel us", "busy us", "idle us", "waits for host us")
    shown = stats.steps if len(stats.steps) <= 12 else [*stats.steps[:6], *stats.steps[-6:]]
    rows = [
        (s.name, s.kernels, s.memcpy, s.memset, *(f"{v:.0f}" for v in (s.host_us, s.kernel_us, s.busy_us, s.idle_us)))
        + (f"{s.waiting_us:.0f}",)
        for s in shown
    ]
    note = "" if stats.alike else "; THEY DIFFER: first calls, other shapes or recompilation"
    more = "" if len(shown) == len(stats.steps) else ", the first and last 6"
    show_table(f"{len(stats.steps)} steps{more}{note}", columns, rows)


def _show_kernels(stats: TraceStats, top: int) -> None:
    columns = ("us", "share", "count", "each us", "what it is", "launched by", "kernel")
    for title, kernels in (
        ("Kernels by time", stats.kernels[:top]),
        ("Smallest kernels", sorted(stats.kernels, key=lambda k: k.total_us / k.count)[: min(top, 5)]),
    ):
        rows = [
            (f"{k.total_us:.1f}", f"{k.share:.1%}", k.count, f"{k.total_us / k.count:.1f}", k.decoded.text)
            + (f"{k.op} {k.shapes}".strip(), _short(k.name))
            for k in kernels
        ]
        if rows:
            show_table(title, columns, rows, left=(4, 5, 6))


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


def _show_waits(stats: TraceStats, top: int) -> None:
    if stats.stretches:
        rows = [
            (s.step, f"{s.start_us:.0f}", f"{s.length_us:.0f}", f"{s.idle_us:.0f}", s.kernels, s.op)
            for s in stats.stretches[: min(top, 5)]
        ]
        columns = ("step", "at us", "long us", "idle us", "kernels", "the host was in")
        show_table("Where the device waits for the host", columns, rows, left=(0, 5))
    if stats.stalls:
        stalls = [(s.call, s.op, s.count, f"{s.total_us:.0f}") for s in stats.stalls[:top]]
        show_table("Where the host waits for the device", ("call", "operation", "count", "us"), stalls, left=(0, 1))
    if stats.copies:
        copies = [(name, n, f"{us:.1f}", size) for name, (n, us, size) in sorted(stats.copies.items())]
        show_table("Copies and sets", ("name", "count", "us", "bytes"), copies)


def _show_chains(report: TraceReport) -> None:
    if not report.stats.kernels:
        return
    name = report.trace.steps[report.step].name
    if not report.chains:
        print(f"\nNo chain of {name} is one that a layer of fusedmlp replaces.")
        return
    print(f"\nWhat fuses in {name}:")
    for group in report.chains:
        print(f"  {group}")
    saved = sum(g.saved for g in report.chains)
    print(f"  in all {saved} of {report.stats.steps[report.step].kernels} launches less a step")
