"""Record the traces that the tests read: our workloads in each variant, and models that we did not write.

    python bench/traces.py --out traces            # on a GPU, about two minutes
    python bench/traces.py --out traces --cpu      # a rehearsal: small shapes, host activity alone

Beside each trace, NAME.counts.json has the launches of one step by other means: the nodes of the step captured into a
CUDA graph, and a second profiler session framed by probe kernels. An item that fails is reported, and the rest goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from bench import common
from bench.trace_models import MODELS
from bench.variants import Gated
from fusedmlp import FusedGeGLUMLP, FusedReLUMLP, profiling
from fusedmlp.profiling.graph_nodes import count_graph_nodes
from fusedmlp.profiling.record import record_trace

Step = Callable[[], Any]
MAX_KB = 150  # of a gzipped trace that is to be shipped


def _stack(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def _workload(name: str, small: bool) -> tuple[nn.Module, nn.Module | None, tuple[int, ...]]:
    """(eager module, its fused stand-in or None, shape of x)."""
    batch, seq, dim, hidden = (2, 8, 32, 64) if small else (64, 128, 768, 3072)
    if name == "linear":
        return nn.Linear(dim, hidden), None, (batch, seq, dim)
    if name == "geglu":
        eager = Gated(dim, hidden, nn.GELU(approximate="tanh"))
        return eager, FusedGeGLUMLP.from_module(eager), (batch, seq, dim)
    stack = _stack(32 if small else 1024)
    return stack, FusedReLUMLP.from_module(stack), (16, 32) if small else (128, 1024)


def _passes(module: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> dict[str, Step]:
    """The forward without gradients, and forward plus backward whose gradients start as None."""
    dy = torch.ones_like(module(x))

    def forward() -> Tensor:
        with torch.no_grad():
            return module(x)

    def step() -> None:
        torch.autograd.backward(module(x), dy)
        for leaf in (x, *parameters):
            leaf.grad = None

    return {"forward": forward, "step": step}


def _ours(workload: str, variant: str, pass_: str, device: str) -> Step:
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager, fused, shape = _workload(workload, small=device == "cpu")
    module = fused if variant == "fused" else eager
    assert module is not None
    module.to(device, torch.bfloat16)
    x = torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    parameters = list(module.parameters())
    return _passes(torch.compile(module) if variant == "compile" else module, x, parameters)[pass_]


def _graph(device: str) -> Step:
    """Replays of the captured geglu forward; on a CPU its eager form."""
    forward = _ours("geglu", "eager", "forward", device)
    if device == "cpu":
        return forward
    for _ in range(3):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()

    def replay(keep: Step = forward) -> None:  # the graph reads the tensors that this function holds
        graph.replay()

    return replay


def _two_streams(device: str) -> Step:
    """Two independent geglu forwards, one on a side stream, joined at the end."""
    one, two = (_ours("geglu", variant, "forward", device) for variant in ("eager", "fused"))
    side = torch.cuda.Stream() if device == "cuda" else None

    def step() -> None:
        if side is None:
            one(), two()
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            two()
        one()
        torch.cuda.current_stream().wait_stream(side)

    return step


def items() -> dict[str, tuple[Callable[[str], Step], int]]:
    """Name -> (what makes the step for a device, how many steps are recorded)."""
    found: dict[str, tuple[Callable[[str], Step], int]] = {}
    for workload in ("linear", "geglu", "naive"):
        for variant in ("eager", "compile", "fused"):
            if workload == "linear" and variant == "fused":
                continue  # a linear layer alone is one launch already: there is nothing of ours
            for pass_ in ("forward", "step"):
                make = _bound(workload, variant, pass_)
                found[f"{workload}-{variant}-{pass_}"] = make, 3
    found["geglu-graph-forward"] = _graph, 3
    found["geglu-two-streams-forward"] = _two_streams, 3
    for name, model in MODELS.items():
        found[f"model-{name}"] = model, 1
    return found


def _bound(workload: str, variant: str, pass_: str) -> Callable[[str], Step]:
    return lambda device: _ours(workload, variant, pass_, device)


def _second_source(step: Step, capturable: bool) -> dict[str, Any]:
    """Launches of one step by other means; the reason in words where one does not work."""
    found: dict[str, Any] = {"graph_nodes": "not captured: optimisers and replays of graphs refuse to be"}
    sources: dict[str, Callable[[Step], Any]] = {"framed_profile": profiling.count_launches}
    if capturable:
        sources["graph_nodes"] = count_graph_nodes
    for name, source in sources.items():
        try:
            found[name] = dataclasses.asdict(source(step))
        except Exception as error:  # the trace is good all the same
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def _record(name: str, make: Callable[[str], Step], active: int, device: str, out: Path) -> str:
    began = time.perf_counter()
    step = make(device)
    for _ in range(4):  # compilation, cuBLAS workspaces, the allocator's pools
        step()
    gpu = common.gpu_slug(torch.cuda.get_device_name()) if device == "cuda" else "cpu"
    path = record_trace(step, out / f"{gpu}-{name}.json.gz", active=active)
    counts: dict[str, Any] = {
        "trace": path.name,
        "active": active,
        "commit": common.commit(),
        "torch": torch.__version__,
    }
    capturable = not name.startswith(("model-", "geglu-graph"))
    counts |= {"device": gpu, "triton": common.version("triton")} | _second_source(step, capturable)
    (out / f"{gpu}-{name}.counts.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    kb = path.stat().st_size / 1024
    large = f"  (above {MAX_KB} KB)" if kb > MAX_KB else ""
    return f"{name}: {kb:.0f} KB{large}, {time.perf_counter() - began:.1f} s, graph nodes {counts['graph_nodes']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where an item failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names to record, such as 'geglu-*'")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args(argv)
    if not args.cpu:
        common.need_gpu()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: item for name, item in items().items() if fnmatch.fnmatch(name, args.only)}
    if not chosen:
        parser.error(f"no trace is named {args.only!r}; there are {', '.join(items())}")
    failed = []
    for name, (make, active) in chosen.items():
        try:
            print(_record(name, make, active, "cpu" if args.cpu else "cuda", args.out), flush=True)
        except Exception as error:  # one model less is no reason to lose the others
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {error}")
        gc.collect()
    print(f"{len(chosen) - len(failed)} of {len(chosen)} recorded in {args.out}")
    for text in failed:
        print(f"FAILED {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
