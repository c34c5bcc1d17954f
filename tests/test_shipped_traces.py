"""The traces of an H200: counts, names and chains as checked by hand, and as other means count them.

Recorded by bench/traces.py. Beside each lie the launches of one step by the nodes of a captured CUDA graph and by a
profile framed by probe kernels; hta.json has what HolisticTraceAnalysis says (bench/hta_numbers.py).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusedmlp import cli
from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace.model import busy_us
from fusedmlp.profiling.trace_report import TraceReport

TRACES = Path(__file__).resolve().parent / "traces"
HTA = json.loads((TRACES / "hta.json").read_text())["traces"]

GEGLU, SWIGLU, STACK = "FusedGeGLUMLP", "FusedSwiGLUMLP", "FusedReLUMLP"
GELU_MLP, TANH_MLP = "FusedMLP(activation='gelu')", "FusedMLP(activation='gelu_tanh')"
Fusion = tuple[int, str, str, int, int]  # how often, direction, layer, launches now and then


class Expected(NamedTuple):
    """Of a step: kernels, copies and memsets; what fuses."""

    kernels: int
    memory: int
    chains: set[Fusion] = set()


EXPECTED = {
    "linear-eager-forward": Expected(1, 1),
    "linear-eager-step": Expected(4, 2),
    "linear-compile-forward": Expected(1, 1),
    "linear-compile-step": Expected(5, 1),
    "geglu-eager-forward": Expected(5, 2, {(1, "forward", GEGLU, 5, 2)}),
    "geglu-eager-step": Expected(15, 3, {(1, "forward", GEGLU, 5, 2), (1, "backward", GEGLU, 10, 4)}),
    "geglu-compile-forward": Expected(4, 2, {(1, "forward", GEGLU, 4, 2)}),
    "geglu-compile-step": Expected(12, 3, {(1, "forward", GEGLU, 4, 2), (1, "backward", GEGLU, 8, 4)}),
    "geglu-fused-forward": Expected(2, 0),
    "geglu-fused-step": Expected(6, 0),
    "geglu-graph-forward": Expected(5, 2, {(1, "forward", GEGLU, 5, 2)}),
    "geglu-two-streams-forward": Expected(7, 2, {(1, "forward", GEGLU, 5, 2)}),
    "naive-eager-forward": Expected(6, 0, {(1, "forward", STACK, 6, 1)}),
    "naive-eager-step": Expected(18, 0, {(1, "forward", STACK, 6, 1), (1, "backward", STACK, 12, 7)}),
    "naive-compile-forward": Expected(6, 0, {(1, "forward", STACK, 6, 1)}),
    "naive-compile-step": Expected(15, 0, {(1, "forward", STACK, 6, 1), (1, "backward", STACK, 9, 7)}),
    "naive-fused-forward": Expected(1, 0),
    "naive-fused-step": Expected(8, 0),
    "model-vit-step": Expected(175, 36, {(3, "forward", GELU_MLP, 3, 2), (3, "backward", GELU_MLP, 7, 4)}),
    "model-llama-step": Expected(319, 33, {(2, "forward", SWIGLU, 5, 2), (2, "backward", SWIGLU, 10, 4)}),
    "model-resnet-step": Expected(249, 14),
    "model-gpt2-autocast-step": Expected(235, 27, {(2, "forward", TANH_MLP, 10, 2), (2, "backward", TANH_MLP, 17, 4)}),
    # One of the two layers has a layer norm's kernels between its first product and the others.
    "model-bert-compile-step": Expected(
        *(125, 10),
        {(2, "forward", GELU_MLP, 3, 2), (1, "backward", GELU_MLP, 9, 4), (1, "backward", GELU_MLP, 6, 3)},
    ),
    "model-llama-compile-graphs-forward": Expected(21, 3, {(1, "forward", SWIGLU, 4, 2)}),
}
MODELS = [name for name in EXPECTED if name.startswith("model-")]


@cache
def report(name: str) -> TraceReport:
    return TraceReport(load(TRACES / f"h200-{name}.json.gz"))


def counts(name: str) -> dict[str, Any]:
    return json.loads((TRACES / f"h200-{name}.counts.json").read_text())  # type: ignore[no-any-return]


def test_every_trace_is_expected_and_they_are_small() -> None:
    found = {p.name.removeprefix("h200-").removesuffix(".json.gz") for p in TRACES.glob("*.json.gz")}
    assert found == set(EXPECTED)
    assert sum(p.stat().st_size for p in TRACES.iterdir()) < 2e6


@pytest.mark.parametrize("name", EXPECTED)
def test_launches_of_every_step(name: str) -> None:
    steps = report(name).stats.steps
    assert len(steps) == counts(name)["active"]
    assert {s.kernels for s in steps} == {EXPECTED[name].kernels}
    assert {s.memcpy + s.memset for s in steps} == {EXPECTED[name].memory}


@pytest.mark.parametrize("name", EXPECTED)
def test_launches_agree_with_other_means(name: str) -> None:
    """The framed profile of every step, the graph's nodes of those that can be captured."""
    step, other = report(name).stats.steps[0], counts(name)
    framed, nodes = other["framed_profile"], other["graph_nodes"]
    assert (step.kernels, step.memcpy, step.memset) == tuple(framed[k] for k in ("kernels", "memcpy", "memset"))
    if name.startswith("model-") or name == "geglu-graph-forward":
        assert isinstance(nodes, str)
    else:
        assert (step.kernels, step.memcpy, step.memset) == tuple(nodes[k] for k in ("kernels", "memcpy", "memset"))


@pytest.mark.parametrize("name", EXPECTED)
def test_what_fuses(name: str) -> None:
    found = {(g.count, g.chain.direction, g.chain.layer, g.chain.now, g.chain.then) for g in report(name).chains}
    assert found == EXPECTED[name].chains


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers_agree_with_holistic_trace_analysis(name: str) -> None:
    trace, stats = report(name).trace, report(name).stats
    launched = [w for w in trace.kernels if w.call is not None and w.call.name.startswith("cudaLaunchKernel")]
    ours = {
        "kernels": len(trace.kernels),
        "busy_us": busy_us(trace.kernels),
        "idle_us": stats.idle_us,
        "span_us": stats.busy_us + stats.idle_us,
        "launches": len(launched),
        "launch_call_us": sum(w.call.duration for w in launched if w.call),
        "launch_delay_us": sum(max(0.0, w.start - w.call.end) for w in launched if w.call),
        "launched_us": sum(w.duration for w in launched),
    }
    assert ours == pytest.approx(HTA[f"h200-{name}.json.gz"], rel=0.01)


@pytest.mark.parametrize("name", EXPECTED)
def test_kernel_time_has_names(name: str) -> None:
    assert report(name).stats.named_share >= (0.95 if name in MODELS else 1.0)


def decoded(name: str) -> list[str]:
    """Kernels of a step in words, in order of launch."""
    found = report(name)
    return [k.decoded.text for w in found.work for k in found.stats.kernels if k.name == w.name and w.kind == "kernel"]


def test_names_of_the_eager_layer() -> None:
    gate, act, up, product, down = decoded("geglu-eager-forward")
    tile = "bfloat16 product, 256x128 tile, 4 stages of 64 along K, cluster 1x2, TN (cuBLAS)"
    assert gate == up == tile
    assert act == "gelu of bfloat16 (PyTorch)"
    assert product.startswith("mul of bfloat16")
    assert down == "bfloat16 product, 192x128 tile, 5 stages of 64 along K, cluster 1x2, TN (cuBLAS)"


def test_names_of_the_others() -> None:
    assert decoded("linear-eager-forward") == [
        "bfloat16 product, 256x128 tile, 4 stages of 64 along K, cluster 1x2, TN, bias in the epilogue (cuBLAS)"
    ]
    assert decoded("geglu-compile-forward")[2] == "pointwise: gelu, mul (Inductor)"
    hidden = "hidden layer: products, bias, activation, 132 blocks of 384 threads"
    assert decoded("geglu-fused-forward")[0] == f"FusedGLUMLP, FusedMLP: {hidden}"  # no operation in a no_grad forward
    assert decoded("geglu-fused-step")[0] == f"FusedGLUMLP: {hidden}"
    assert decoded("naive-fused-forward") == ["FusedReLUMLP: all layers of a ReLU stack, 128 blocks of 128 threads"]
    assert [text.split(",")[0] for text in decoded("naive-eager-forward")][::2] == ["bfloat16 product"] * 3
    backward = decoded("geglu-fused-step")[2:]
    assert "gradient of the hidden layer" in backward[0] and len(backward) == 4


def test_products_have_their_sizes_and_rates() -> None:
    from fusedmlp.profiling.verdict import products

    gate, up, down = products(report("geglu-eager-forward").work)
    assert (gate.M, gate.N, gate.K) == (up.M, up.N, up.K) == (8192, 3072, 768)
    assert (down.M, down.N, down.K) == (8192, 768, 3072)
    assert gate.flop == 2 * 8192 * 3072 * 768 and gate.bytes == 2 * (8192 * 768 + 3072 * 768 + 8192 * 3072)
    assert 500 < gate.tflop_s < 990


def test_bytes_saved_by_the_gated_layer() -> None:
    hidden = 8192 * 3072 * 2
    assert [g.bytes_saved for g in report("geglu-eager-forward").chains] == [6 * hidden]
    assert {g.bytes_saved for g in report("geglu-eager-step").chains} == {4 * hidden, 5 * hidden}


def test_two_streams_are_one_device() -> None:
    stats = report("geglu-two-streams-forward").stats
    assert (stats.devices, stats.streams) == (1, 2)
    assert stats.kernel_us > busy_us(report("geglu-two-streams-forward").trace.kernels)


@pytest.mark.parametrize("name", ["geglu-eager-step", "naive-fused-forward", "model-llama-compile-graphs-forward"])
def test_the_command_prints_and_writes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    trace = str(TRACES / f"h200-{name}.json.gz")
    assert cli.main(["explain", trace, "--json", str(data), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA H200" in text and "Kernels by time" in text
    assert ("What fuses" in text) == bool(EXPECTED[name].chains)
    content = json.loads(data.read_text())
    assert [s["kernels"] for s in content["steps"]] == [EXPECTED[name].kernels] * counts(name)["active"]
    assert len(content["chains"]) == len(EXPECTED[name].chains)
    assert cli.main(["explain", trace, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "NVIDIA H200"
