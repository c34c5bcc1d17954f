"""What goes wrong when launches and times are taken, each shown by a few lines and the numbers that they print.

    python bench/pitfalls.py --out bench/results/h200/profile/pitfalls.json    # on a GPU; docs/profiling.md quotes it

Without a GPU (--cpu) the same code runs on small shapes; counts are then those of the host, and times say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from bench import common
from fusedmlp.profiling import HostCountWarning, count_launches
from fusedmlp.profiling.assertions import training_step
from fusedmlp.profiling.workloads import mlp


class Setting:
    """The device, and shapes that fit it."""

    def __init__(self, cpu: bool) -> None:
        self.device = "cpu" if cpu else "cuda"
        self.tokens, self.dim, self.hidden = (64, 32, 64) if cpu else (8192, 768, 3072)
        self.dtype = torch.float32 if cpu else torch.bfloat16

    def layer(self, kind: str = "geglu", dtype: torch.dtype | None = None) -> nn.Module:
        return mlp(kind, self.dim, self.hidden).to(self.device, dtype or self.dtype)

    def x(self, tokens: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        size = (tokens or self.tokens, self.dim)
        return torch.randn(*size, device=self.device, dtype=dtype or self.dtype, requires_grad=True)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def us(self, call: Callable[[], Any], wait: bool, repeats: int = 21) -> float:
        """Median of the host's clock around one call, in microseconds."""
        times = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            call()
            if wait:
                self.wait()
            times.append((time.perf_counter() - begin) * 1e6)
        return round(statistics.median(times), 1)


def no_synchronise(s: Setting) -> dict[str, Any]:
    layer, x = s.layer(), s.x()
    layer(x)
    return {"us_without": s.us(lambda: layer(x), wait=False), "us_with": s.us(lambda: layer(x), wait=True)}


def first_call(s: Setting) -> dict[str, Any]:
    torch._dynamo.reset()
    layer, x = torch.compile(s.layer()), s.x()
    begin = time.perf_counter()
    layer(x)
    s.wait()
    first = time.perf_counter() - begin
    return {"first_ms": round(first * 1e3, 1), "later_ms": round(s.us(lambda: layer(x), wait=True) / 1e3, 3)}


def graph_break(s: Setting) -> dict[str, Any]:
    layer = s.layer()

    def broken(x: Tensor) -> Tensor:
        act = layer.act_fn(layer.gate_proj(x))  # type: ignore[operator]
        torch._dynamo.graph_break()
        return layer.down_proj(act * layer.up_proj(x))  # type: ignore[operator]

    torch._dynamo.reset()
    x = s.x()
    found = {}
    for name, call in (("whole", torch.compile(layer)), ("broken", torch.compile(broken))):
        found[name] = count_launches(lambda call=call: call(x)).kernels  # type: ignore[misc]
    try:
        torch.compile(broken, fullgraph=True)(x)
        found["fullgraph_true"] = "ran"
    except Exception as error:
        found["fullgraph_true"] = type(error).__name__
    return found


def dynamic_shapes(s: Setting) -> dict[str, Any]:
    found = {}
    for name, dynamic in (("static", False), ("default", None), ("dynamic", True)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layer = torch.compile(s.layer(), dynamic=dynamic)
        for tokens in (32, 48, 80, 112, 144):
            layer(s.x(tokens))
        found[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"graphs_for_5_lengths": found}


def casts_and_fills(s: Setting) -> dict[str, Any]:
    layer, x = s.layer(dtype=torch.float32), s.x(dtype=torch.float32)

    def forward() -> None:
        with torch.autocast(s.device, dtype=torch.bfloat16):
            layer(x)

    kept = s.layer()
    step = training_step(kept, s.x())
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.0)
    y = s.x()

    def zeroed() -> None:
        kept(y).backward(torch.ones_like(y))
        optimizer.zero_grad(set_to_none=False)

    zeroed()
    counts = count_launches(zeroed)
    return {
        "forward": count_launches(lambda: kept(y)).kernels,
        "forward_autocast": count_launches(forward).kernels,
        "step_none": count_launches(step).kernels,
        "step_zeroed": counts.kernels,
        "step_zeroed_memset": counts.memset,
    }


def retained_graph(s: Setting) -> dict[str, Any]:
    layer, x = s.layer(), s.x()
    held = {}
    for name, retain in (("freed", False), ("retained", True)):
        y = layer(x)
        y.backward(torch.ones_like(y), retain_graph=retain)
        s.wait()
        held[name] = torch.cuda.memory_allocated() / 2**20 if s.device == "cuda" else 0.0
        del y
    return {"MiB": {name: round(value, 1) for name, value in held.items()}}


def backward_thread(s: Setting) -> dict[str, Any]:
    step = training_step(s.layer(), s.x(128))
    found = {}
    for name, threads in (("own_thread", True), ("calling_thread", False)):
        with torch.autograd.set_multithreading_enabled(threads):
            for _ in range(20):
                step()
            found[f"us_{name}"] = s.us(step, wait=True, repeats=101)
    return found


PITFALLS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "no_synchronise": no_synchronise,
    "first_call": first_call,
    "graph_break": graph_break,
    "dynamic_shapes": dynamic_shapes,
    "casts_and_fills": casts_and_fills,
    "retained_graph": retained_graph,
    "backward_thread": backward_thread,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    gpu = "cpu" if args.cpu else common.need_gpu()
    warnings.simplefilter("ignore", HostCountWarning)
    content = common.finding("pitfalls", gpu) | {"pitfalls": {}}
    for name, show in PITFALLS.items():
        torch.manual_seed(0)
        content["pitfalls"][name] = show(Setting(args.cpu))
        print(name, content["pitfalls"][name], flush=True)
    if args.out:
        common.write_finding(content, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
