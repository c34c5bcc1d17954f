"""Timing on the device: graphs that share memory, kernel times under load, and kernels compiled ahead."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
import torch

from fusedmlp import count_launches, functional, settings
from fusedmlp.settings.types import Settings
from fusedmlp.tune import measure, timing

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import ahead, common  # noqa: E402
from bench.case import Case  # noqa: E402


def test_graphs_that_share_memory_are_right_in_any_order():
    x = [torch.randn(256, 512, device="cuda") for _ in range(3)]
    kept = {name: torch.empty(3, 256, 512, device="cuda") for name in ("double", "square")}

    def call(name: str):
        def run(i: int) -> torch.Tensor:
            made = x[i] * 2 if name == "double" else x[i] * x[i]  # what the graphs' own pool holds
            kept[name][i].copy_(made)
            return made

        return run

    graphs = timing.captured({name: call(name) for name in kept}, 3)
    for order in (("double", "square"), ("square", "double", "double")):
        for tensor in kept.values():
            tensor.fill_(float("nan"))
        for name in order:
            graphs[name].replay()
        torch.cuda.synchronize()
        for i in range(3):
            assert torch.equal(kept["double"][i], x[i] * 2) and torch.equal(kept["square"][i], x[i] * x[i])


def test_a_call_that_raises_within_a_capture_leaves_the_device_usable():
    x = torch.randn(64, device="cuda")

    def call(i: int) -> torch.Tensor:
        if i and torch.cuda.is_current_stream_capturing():
            raise MemoryError("no room")
        return x * 2

    with pytest.raises(MemoryError, match="no room"):
        timing.captured({"raises": call}, 2)
    y = torch.randn(64, device="cuda")  # fails where the generator is left in a capture
    timing.captured({"fine": lambda i: y * 2}, 2)["fine"].replay()
    assert torch.isfinite(y * x).all()


def test_graphs_of_split_sums_hold_no_kernels_that_fill_counters():
    """However many were captured before: the counters of a graph are its own for good."""
    gate, up, down = (
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for n, k in ((3072, 768), (3072, 768), (768, 3072))
    )
    x = torch.randn(8, 768, device="cuda", dtype=torch.bfloat16)

    def call(i: int) -> torch.Tensor:
        with torch.no_grad(), settings.override(family="small", block_n=16, block_k=128, stages=4):
            return functional.glu_mlp(x, gate, up, down)

    call(0)
    for _ in range(100):  # 64 counters a call are more than there are at first
        graph = timing.captured({"small": call}, 48)["small"]
    assert count_launches(graph.replay).kernels == 2 * 48


def test_kernel_time_agrees_with_replays_under_load():
    case = Case("geglu", (8192, 768, 3072))
    case.add("eager")
    call = case.forward("eager")
    case.warm_up(call)
    kernels = statistics.median(common.kernel_us({"eager": call}, case.sets)["eager"])
    replays = statistics.median(timing.graph_us({"eager": call}, case.sets)["eager"])
    assert 0.8 < kernels / replays < 1.1  # replays hold the gaps between five kernels too


def launch_for_real(op: str, candidate: Settings, shape: tuple[int, int, int], folder: str) -> None:
    """Runs a candidate, and says which kernels that added to Triton's cache."""
    cache = Path(folder)
    before = {(path.stem, path.parent.name) for path in cache.rglob("*.cubin")}
    p = measure.Problem.make(*shape, torch.bfloat16)
    measure.run_ours(op, measure.plan_of(op, p, candidate), p)
    torch.cuda.synchronize()
    added = {(path.stem, path.parent.name) for path in cache.rglob("*.cubin")} - before
    ahead_of = sorted(name for name, _ in before)
    assert before and not added, f"{candidate}: {sorted(added)} when launched; there were {ahead_of}"


@pytest.mark.xfail(
    strict=True,
    reason="glu_tma and glu_backward_tma compile once more when they are launched, for a reason not known yet: their "
    "candidates are not compiled ahead, and a sweep compiles them itself",
)
@pytest.mark.timeout(300)
def test_what_is_compiled_ahead_is_what_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One candidate of each family of each kernel, in processes that find nothing but this cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiling: list[ahead.Task] = []
    launching: list[ahead.Task] = []
    for op, tokens in (("glu", 512), ("glu", 16), ("down", 16), ("glu_backward", 512), ("dual_dgrad", 512)):
        shape = (tokens, 768, 3072)
        by_family = {c.family: c for c in measure.candidates_for(op, *shape, torch.bfloat16) if c.family != "pair"}
        for candidate in by_family.values():
            small = ahead.stand_in(candidate, shape)
            compiling.append((ahead.compile_kernel, (op, candidate, small, "bfloat16")))
            launching.append((launch_for_real, (op, candidate, shape, str(tmp_path))))
    assert len(compiling) > 5
    assert ahead.run(compiling, 4) == len(compiling)
    assert ahead.run(launching, 1) == len(launching)
