"""Chains that a layer of ours replaces, found in the order of launches and checked by sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trace_builder import (
    ADD,
    GELU,
    GELU_BACKWARD,
    GEMM,
    MUL,
    RELU,
    SPLIT,
    SUM,
    D,
    H,
    M,
    TraceBuilder,
    elementwise,
    geglu_backward,
    geglu_forward,
    linear,
    product,
)

from fusedmlp.activations import ACTIVATIONS
from fusedmlp.profiling.trace import tokens
from fusedmlp.profiling.trace.chains import Chain, find_chains, grouped
from fusedmlp.profiling.trace.load import load

FILL = elementwise("at::native::FillFunctor<float>")


def chains_of(t: TraceBuilder, tmp_path: Path) -> list[Chain]:
    return find_chains(load(t.write(tmp_path / "t.json")).work)


def summary(chains: list[Chain]) -> list[tuple[str, str, int, int]]:
    return [(c.layer, c.direction, c.now, c.then) for c in chains]


def test_a_training_step_of_geglu(tmp_path: Path) -> None:
    t = TraceBuilder()
    geglu_forward(t)
    geglu_backward(t)
    found = chains_of(t, tmp_path)
    assert summary(found) == [("FusedGeGLUMLP", "forward", 5, 2), ("FusedGeGLUMLP", "backward", 10, 4)]
    assert found[0].shape == "[8192, 768 -> 3072 -> 768]"
    hidden = M * H * 2
    assert [c.bytes_saved for c in found] == [4 * hidden, 5 * hidden]
    assert [g.saved for g in grouped(found)] == [6, 3]


def test_a_forward_alone_keeps_nothing_and_saves_more(tmp_path: Path) -> None:
    t = TraceBuilder()
    geglu_forward(t)
    (chain,) = chains_of(t, tmp_path)
    assert chain.bytes_saved == 6 * M * H * 2


def test_inductors_forward_and_backward(tmp_path: Path) -> None:
    t = TraceBuilder(shapes=False)
    for kernel in (GEMM, GEMM, "triton_poi_fused_gelu_mul_0", GEMM):
        t.launch(kernel)
    for kernel in (GEMM, GEMM, "triton_poi_fused_gelu_gelu_backward_mul_1", GEMM, GEMM, GEMM, GEMM):
        t.launch(kernel)
    found = chains_of(t, tmp_path)
    assert summary(found) == [("FusedGeGLUMLP", "forward", 4, 2), ("FusedGeGLUMLP", "backward", 7, 4)]
    assert [c.bytes_saved for c in found] == [None, None]


def test_kernels_of_a_graph_have_no_operations_and_still_a_chain(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.graph(GEMM, GELU, GEMM, MUL, GEMM)
    assert summary(chains_of(t, tmp_path)) == [("FusedGeGLUMLP", "forward", 5, 2)]


@pytest.mark.parametrize("bias", [False, True])
def test_relu_stack(tmp_path: Path, bias: bool) -> None:
    t = TraceBuilder()
    for _ in range(3):
        linear(t, 128, 1024, 1024, bias=bias)
        with t.op("aten::relu", [128, 1024]):
            t.launch(RELU)
    for _ in range(3):
        with t.op("autograd::engine::evaluate_function: ReluBackward0"):
            with t.op("aten::threshold_backward", [128, 1024], [128, 1024]):
                t.launch(elementwise("at::native::(anonymous namespace)::threshold_kernel_impl<float>"))
        with t.op("autograd::engine::evaluate_function: AddmmBackward0"):
            product(t, 128, 1024, 1024)
            product(t, 1024, 128, 1024)
            if bias:
                with t.op("aten::sum", [128, 1024]):
                    t.launch(SUM)
    found = chains_of(t, tmp_path)
    assert summary(found) == [
        ("FusedReLUMLP", "forward", 6, 1),
        ("FusedReLUMLP", "backward", 12 if bias else 9, 7),
    ]
    assert found[0].shape == "[128, 1024 -> 1024 -> 1024 -> 1024]"


@pytest.mark.parametrize("form, activation", [(1, "gelu_tanh"), (2, "gelu")])
def test_two_layer_mlp_with_gelu(form: int, activation: str, tmp_path: Path) -> None:
    """PyTorch's kernels have both forms of GELU, that by tanh first."""
    gelu, gelu_backward = (
        k.replace("GeluType)::{lambda()#1}", f"GeluType)::{{lambda()#{form}}}") for k in (GELU, GELU_BACKWARD)
    )
    t = TraceBuilder()
    linear(t, M, D, H, bias=True)
    with t.op("aten::gelu", [M, H]):
        t.launch(gelu)
    linear(t, M, H, D, bias=True)
    with t.op("autograd::engine::evaluate_function: AddmmBackward0"):
        product(t, M, D, H), product(t, H, M, D)
        with t.op("aten::sum", [M, D]):
            t.launch(SUM)
    with t.op("autograd::engine::evaluate_function: GeluBackward0"), t.op("aten::gelu_backward", [M, H]):
        t.launch(gelu_backward)
    with t.op("autograd::engine::evaluate_function: AddmmBackward0"):
        product(t, M, H, D), product(t, D, M, H)
        with t.op("aten::sum", [M, H]):
            t.launch(SUM)
    assert summary(chains_of(t, tmp_path)) == [
        (f"FusedMLP(activation={activation!r})", "forward", 3, 2),
        (f"FusedMLP(activation={activation!r})", "backward", 7, 4),
    ]


def test_activations_written_out_are_one(tmp_path: Path) -> None:
    t = TraceBuilder()
    pow_, tanh = (elementwise(f"at::native::(anonymous namespace)::{n}_kernel_impl<x>") for n in ("pow_tensor", "tanh"))
    linear(t, 64, 32, 128)
    for name, kernel in zip(
        ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"),
        (MUL, pow_, MUL, ADD, MUL, tanh, ADD, MUL),
        strict=True,
    ):
        with t.op(f"aten::{name}", [64, 128]):
            t.launch(kernel)
    linear(t, 64, 128, 32)
    assert summary(chains_of(t, tmp_path)) == [("FusedMLP(activation='gelu_tanh')", "forward", 10, 2)]


def test_casts_and_split_products_stand_in_no_ones_way(tmp_path: Path) -> None:
    t = TraceBuilder()
    copy = elementwise("at::native::bfloat16_copy_kernel_cuda(x)::y")
    with t.op("aten::linear"):
        with t.op("aten::_to_copy", [128, 32], dtype="float"):
            t.launch(copy)
        product(t, 16, 32, 128)
        t.launch(SPLIT)
    with t.op("aten::relu", [16, 128]):
        t.launch(RELU)
    t.launch(FILL)
    (chain,) = chains_of(t, tmp_path)
    assert (chain.layer, chain.kind, chain.now, chain.then) == ("FusedLinearReLU", "linear_act", 2, 1)
    assert chain.bytes_saved == 2 * 16 * 128 * 2


@pytest.mark.parametrize(
    "second",
    [("aten::gelu", [8, 8], GELU), ("aten::add", [16, 128], ADD), ("aten::mul", [16, 128], MUL)],
    ids=["another size", "a residual", "a scale"],
)
def test_what_is_no_chain(tmp_path: Path, second: tuple[str, list[int], str]) -> None:
    t = TraceBuilder()
    linear(t, 16, 32, 128)
    with t.op(second[0], second[1]):
        t.launch(second[2])
    assert chains_of(t, tmp_path) == []


def test_attention_products_and_our_own_kernels_are_no_chain(tmp_path: Path) -> None:
    t = TraceBuilder()
    with t.op("aten::bmm", [4, 8, 8], [4, 8, 8]):
        t.launch(GEMM)
    with t.op("aten::gelu", [4, 8, 8]):
        t.launch(GELU)
    t.launch("hidden_forward_gluon")
    t.launch(GEMM)
    assert chains_of(t, tmp_path) == []


def test_equal_chains_are_grouped_and_told_once(tmp_path: Path) -> None:
    t = TraceBuilder()
    for _ in range(4):
        geglu_forward(t)
    (group,) = grouped(chains_of(t, tmp_path))
    assert (group.count, group.saved) == (4, 12)
    assert "4 x forward [8192, 768 -> 3072 -> 768]: FusedGeGLUMLP makes 5 launches 2; 12 launches less" in str(group)


def activation(t: TraceBuilder, m: int, n: int, name: str = "aten::relu", kernel: str = RELU) -> None:
    with t.op(name, [m, n]):
        t.launch(kernel)


def test_products_that_do_not_read_what_is_activated_are_no_part_of_a_chain(tmp_path: Path) -> None:
    t = TraceBuilder()
    linear(t, 16, 32, 128), activation(t, 16, 128)
    linear(t, 16, 64, 32)  # of another tensor: K is not 128
    assert summary(chains_of(t, tmp_path)) == [("FusedLinearReLU", "forward", 2, 1)]


def test_branches_are_no_stack(tmp_path: Path) -> None:
    t = TraceBuilder()
    for k, n in ((32, 128), (128, 64), (32, 16), (48, 16)):
        linear(t, 16, k, n), activation(t, 16, n)
    found = summary(chains_of(t, tmp_path))
    assert found == [("FusedReLUMLP", "forward", 4, 1), *[("FusedLinearReLU", "forward", 2, 1)] * 2]


@pytest.mark.parametrize("last", [128, 64])
def test_gate_and_up_read_one_tensor(last: int, tmp_path: Path) -> None:
    """fc1, activation, fc2 of one width and a multiplication are no gated layer: the inputs differ in width."""
    t = TraceBuilder()
    linear(t, 16, 32, 128), activation(t, 16, 128, "aten::gelu", GELU)
    linear(t, 16, 128, 128)
    with t.op("aten::mul", [16, 128], [16, 128]):
        t.launch(MUL)
    linear(t, 16, last, 32)
    assert summary(chains_of(t, tmp_path)) == [("FusedMLP(activation='gelu_tanh')", "forward", 3, 2)]


def test_a_gated_layer_whose_product_goes_elsewhere(tmp_path: Path) -> None:
    t = TraceBuilder()
    linear(t, 16, 32, 128), activation(t, 16, 128, "aten::gelu", GELU)
    linear(t, 16, 32, 128)
    with t.op("aten::mul", [16, 128], [16, 128]):
        t.launch(MUL)
    linear(t, 16, 64, 32)
    assert summary(chains_of(t, tmp_path)) == [("FusedGeGLUMLP", "forward", 4, 1)]


def test_a_scale_is_no_gate(tmp_path: Path) -> None:
    t = TraceBuilder()
    linear(t, 16, 128, 128), linear(t, 16, 128, 128), activation(t, 16, 128, "aten::gelu", GELU)
    with t.op("aten::mul", [16, 128], []):
        t.launch(MUL)
    assert summary(chains_of(t, tmp_path)) == [("FusedLinearAct(activation='gelu_tanh')", "forward", 2, 1)]


def test_a_sigmoid_gate_is_no_silu(tmp_path: Path) -> None:
    t = TraceBuilder()
    linear(t, 16, 32, 128), linear(t, 16, 32, 128)
    activation(t, 16, 128, "aten::sigmoid", elementwise("at::native::sigmoid_kernel_cuda(x)::{lambda()#1}"))
    with t.op("aten::mul", [16, 128], [16, 128]):
        t.launch(MUL)
    linear(t, 16, 128, 32)
    assert summary(chains_of(t, tmp_path)) == [("FusedGLUMLP(activation='sigmoid')", "forward", 5, 2)]


def test_streams_and_devices_have_chains_of_their_own(tmp_path: Path) -> None:
    t = TraceBuilder()
    for m, k, n in ((16, 32, 128), (16, 128, 32)):
        for stream in (7, 20):
            with t.op("aten::mm", [m, k], [k, n]):
                t.launch(GEMM, stream=stream)
        for stream in (7, 20) if n == 128 else ():
            with t.op("aten::relu", [m, n]):
                t.launch(RELU, stream=stream)
    for event in t.events:
        if event["args"].get("stream") == 20:
            event["args"]["device"] = 1
    assert summary(chains_of(t, tmp_path)) == [("FusedMLP(activation='relu')", "forward", 3, 2)] * 2


@pytest.mark.parametrize("rows, layers, then", [(128, 4, 1), (128, 5, 5), (8192, 3, 3), (256, 2, 2)])
def test_a_stack_is_one_launch_where_the_plan_says_so(rows: int, layers: int, then: int, tmp_path: Path) -> None:
    t = TraceBuilder()
    for _ in range(layers):
        linear(t, rows, 1024, 1024), activation(t, rows, 1024)
    assert summary(chains_of(t, tmp_path)) == [("FusedReLUMLP", "forward", 2 * layers, then)]


@pytest.mark.parametrize("residual", [True, False])
def test_a_backward_fuses_where_its_forward_does(residual: bool, tmp_path: Path) -> None:
    """relu(linear(x) + x): a mask and two products in the backward, but no layer has the addition between them."""
    t = TraceBuilder()
    linear(t, 16, 128, 128, bias=True)
    if residual:
        with t.op("aten::add", [16, 128], [16, 128]):
            t.launch(ADD)
    activation(t, 16, 128)
    with t.op("autograd::engine::evaluate_function: ReluBackward0"), t.op("aten::threshold_backward", [16, 128]):
        t.launch(elementwise("at::native::(anonymous namespace)::threshold_kernel_impl<float>"))
    with t.op("autograd::engine::evaluate_function: AddmmBackward0"):
        product(t, 16, 128, 128), product(t, 128, 16, 128)
        with t.op("aten::sum", [16, 128]):
            t.launch(SUM)
    backward = ("FusedLinearReLU", "backward", 4, 3)
    assert summary(chains_of(t, tmp_path)) == ([] if residual else [("FusedLinearReLU", "forward", 2, 1), backward])


def test_a_backward_alone_has_no_forward_to_go_by(tmp_path: Path) -> None:
    t = TraceBuilder()
    geglu_backward(t)
    assert summary(chains_of(t, tmp_path)) == [("FusedGeGLUMLP", "backward", 10, 4)]


def functor(name: str) -> str:
    return elementwise(f"at::native::(anonymous namespace)::{name}(at::TensorIteratorBase&)::{{lambda()#1}}")


@pytest.mark.parametrize("name", ["tanh", "leaky_relu", "hardswish", "hardtanh", "hardsigmoid"])
@pytest.mark.parametrize("graph", [False, True])
def test_activations_that_no_layer_has_are_no_chain(name: str, graph: bool, tmp_path: Path) -> None:
    t = TraceBuilder()
    if graph:
        t.graph(GEMM, functor(f"{name}_kernel"), GEMM)
    else:
        (
            linear(t, 16, 32, 128),
            activation(t, 16, 128, f"aten::{name}", functor(f"{name}_kernel")),
            linear(t, 16, 128, 32),
        )
    assert chains_of(t, tmp_path) == []


def test_every_chain_names_an_activation_of_ours() -> None:
    named = {"gelu", "relu", "silu", "sigmoid", "quick_gelu", "gelu_tanh", "relu2"}
    assert named == ACTIVATIONS.keys() - {"identity"} == tokens.ACTIVATIONS & ACTIVATIONS.keys()


def test_an_activation_of_another_shape_is_of_another_tensor(tmp_path: Path) -> None:
    t = TraceBuilder()
    linear(t, 16, 32, 128), activation(t, 128, 16, "aten::gelu", GELU)
    assert chains_of(t, tmp_path) == []
