"""Sizes beyond 32-bit offsets and beyond the grid's y and z limits, and long reductions."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.memory import poisoned_memory

import fusedmlp.functional as fused

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _freed():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def random(*shape, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(shape, device="cuda", dtype=dtype) * scale).requires_grad_()


def plain_glu(x, gate, up, down):
    return F.linear(F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up), down)


def chunked_gradients(function, x, weights, gy, chunk):
    """fp32 sums over row chunks of the eager weight gradients, each chunk in the dtype of the call."""
    totals = [torch.zeros(w.shape, device="cuda") for w in weights]
    for start in range(0, len(x), chunk):
        mine = [w.detach().clone().requires_grad_() for w in weights]
        function(x[start : start + chunk].detach(), *mine).backward(gy[start : start + chunk])
        for total, weight in zip(totals, mine, strict=True):
            total += weight.grad.float()
    return totals


def sample_rows(count):
    generator = torch.Generator().manual_seed(0)
    middle = torch.randint(count, (1000,), generator=generator)
    return torch.cat((torch.arange(64), middle, torch.arange(count - 64, count))).cuda()


def check(fused_call, plain_call, x, weights, chunk):
    with poisoned_memory():
        y = fused_call(x, *weights)
    gy = torch.randn_like(y)
    with poisoned_memory():
        y.backward(gy)
    assert not y.isnan().any() and not x.grad.isnan().any()
    rows = sample_rows(len(x))
    part = x.detach()[rows].requires_grad_()
    wanted = plain_call(part, *[w.detach() for w in weights])
    wanted.backward(gy[rows])
    assert relative_error(y[rows], wanted) < 1e-2
    assert relative_error(x.grad[rows], part.grad) < 1e-2
    for first in (slice(0, 64), slice(-64, None)):  # each end by itself: an error there must not drown
        assert relative_error(y[rows][first], wanted[first]) < 1e-2
        assert relative_error(x.grad[rows][first], part.grad[first]) < 1e-2
    totals = chunked_gradients(plain_call, x, weights, gy, chunk)
    for i, (weight, total) in enumerate(zip(weights, totals, strict=True)):
        error = relative_error(weight.grad, total)
        assert error < 1e-2, f"gradient of weight {i} off by {error:.2e}"


@pytest.mark.parametrize("rows", [65535, 65537, 65600])
def test_more_than_2_to_31_hidden_elements_gated(rows):
    """65536 x 32768 is 2^31: one row fewer, one more, and a tile more."""
    x = random(rows, 64)
    gate, up = random(32768, 64, scale=1 / 8), random(32768, 64, scale=1 / 8)
    down = random(64, 32768, scale=1 / 181)

    def call(x, gate, up, down):
        return fused.glu_mlp(x, gate, up, down, activation="gelu_tanh")

    check(call, plain_glu, x, (gate, up, down), chunk=8192)


@pytest.mark.parametrize("op", ["linear_act", "mlp", "relu_mlp"])
def test_more_than_2_to_31_hidden_elements(op):
    x, weight = random(65600, 64), random(32768, 64, scale=1 / 8)
    if op == "linear_act":
        calls = (
            (lambda x, w: fused.linear_act(x, w, activation="relu")),
            (lambda x, w: F.relu(F.linear(x, w))),
        )
        check(*calls, x, (weight,), chunk=8192)
        return
    second = random(64, 32768, scale=1 / 181)
    if op == "mlp":

        def call(x, first, second):
            return fused.mlp(x, first, second, activation="gelu")

        def plain(x, first, second):
            return F.linear(F.gelu(F.linear(x, first)), second)
    else:

        def call(x, first, second):
            return fused.relu_mlp(x, (first, second), (None, None))

        def plain(x, first, second):
            return F.relu(F.linear(F.relu(F.linear(x, first)), second))

    check(call, plain, x, (weight, second), chunk=8192)


def test_more_than_2_to_31_input_elements():
    x, weight = random(2_200_000, 1024), random(16, 1024, scale=1 / 32)

    def plain(x, weight):
        return F.relu(F.linear(x, weight))

    check(lambda x, w: fused.linear_act(x, w, activation="relu"), plain, x, (weight,), chunk=131072)


def test_rows_beyond_the_grid_limit():
    """8.5 million rows in tiles of 128 are more than 65535 of them."""
    x, weight = random(8_500_000, 16), random(16, 16, scale=1 / 4)

    def plain(x, weight):
        return F.relu(F.linear(x, weight))

    check(lambda x, w: fused.linear_act(x, w, activation="relu"), plain, x, (weight,), chunk=524288)


def test_rows_beyond_the_grid_limit_gated():
    x = random(2_200_000, 32)
    weights = random(64, 32, scale=1 / 6), random(64, 32, scale=1 / 6), random(32, 64, scale=1 / 8)

    def call(x, gate, up, down):
        return fused.glu_mlp(x, gate, up, down, activation="gelu_tanh")

    check(call, plain_glu, x, weights, chunk=262144)


def test_bias_gradient_over_262144_rows():
    """Within one bf16 ulp of the rounded fp64 sum; a bf16 accumulator would lose all of it."""
    rows, width = 262144, 128
    gy = (torch.randn(rows, width, device="cuda") + 1e-2).bfloat16()
    x, weight = torch.randn(rows, 16, device="cuda").bfloat16(), random(width, 16)
    bias = torch.full((width,), 100.0, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = fused.linear_act(x, weight, bias, activation="relu")
    assert (y > 0).all()
    y.backward(gy)
    exact = gy.double().sum(0)
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs())) - 7)
    assert ((bias.grad.double() - exact.bfloat16().double()).abs() <= ulp).all()
    dw = gy.double().t() @ x.double()
    assert relative_error(weight.grad, dw) < 4e-3


def test_bias_gradient_of_cancelling_rows_in_fp32():
    """No worse than twice eager's error."""
    gy = torch.cat((torch.ones(2048, 64), torch.full((2048, 64), -0.9999))).repeat(16, 1).cuda()
    x, weight = torch.randn(len(gy), 16, device="cuda"), torch.randn(64, 16, device="cuda")
    bias = torch.full((64,), 100.0, device="cuda", requires_grad=True)
    fused.linear_act(x, weight, bias, activation="relu").backward(gy)
    exact, eager = gy.double().sum(0), gy.sum(0)
    assert relative_error(bias.grad, exact) <= 2 * relative_error(eager, exact) + 1e-7
