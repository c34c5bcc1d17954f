"""Weight gradients at token counts where cuBLAS leaves the last tokens out (bench/last_token.py): ours have them."""

from contextlib import nullcontext

import pytest
import torch
from support.operations import OPERATIONS

from fusedmlp import settings
from fusedmlp.activations import resolve_activation
from fusedmlp.launchers.common import weight_grad
from fusedmlp.plan import Plan, left_out

pytestmark = pytest.mark.gpu

WIDTHS = {
    "linear_act": (256, 512),
    "glu_mlp": (256, 512, 128),
    "mlp": (256, 512, 128),
    "relu_mlp": (256, 256, 512, 256),
}
SIZES = [((128, 128), 12808), ((512, 256), 2561), ((512, 256), 7938), ((256, 1024), 10754), ((768, 768), 16642)]
SIZES += [((1536, 384), 38979), ((1024, 1024), 38403), ((3072, 768), 12417)]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@dtypes
@pytest.mark.parametrize("size, tokens", SIZES, ids=str)
def test_product(size, tokens, dtype):
    """As close to float64 as the product of a count that loses nothing, and with the last tokens, which weigh as much
    as many others."""
    N, K = size
    assert left_out(tokens)
    plan = Plan("linear_act", resolve_activation("relu"), tokens, (K, N), dtype, torch.device("cuda", 0), "ieee", True)
    dy = torch.randn(tokens, N, device="cuda", dtype=dtype)
    x = torch.randn(tokens, K, device="cuda", dtype=dtype)
    last = plan.last_tokens(N, K)
    dy[-last:] *= 0.25 * tokens**0.5

    def error(found, first):
        exact = dy[:first].t().double() @ x[:first].double()
        return (found.double() - exact).norm() / exact.norm()

    found = weight_grad(plan, dy, x)
    assert found.dtype == dtype and found.is_contiguous()
    # cuBLAS rounds some split sums before it adds them to the last tokens': two roundings, whose error is the square
    # root of two of one's. Without the last tokens it would be some hundred times as large.
    whole = torch.mm(dy[:-last].t(), x[:-last])
    assert error(found, tokens) <= 1.5 * error(whole, tokens - last) + 1e-6


@dtypes
@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("family", [None, "pair", "pointer"], ids=str)
@pytest.mark.parametrize("tokens", [2561, 5762], ids=str)
def test_operation(op, family, tokens, dtype):
    """The upstream gradient is zero but for the last tokens: a gradient without them would be zero too."""
    with nullcontext() if family is None else settings.override(family=family):
        for seed in range(4):  # the later ones are steady where nothing is forced
            check(OPERATIONS[op], WIDTHS[op], tokens, dtype, seed)


def test_wide_layers():
    for seed in range(4):
        check(OPERATIONS["glu_mlp"], (768, 3072, 768), 12417, torch.bfloat16, seed)


def check(operation, widths, tokens, dtype, seed):
    torch.manual_seed(seed)
    shapes = {"x": (tokens, widths[0])} | operation.shapes(widths)
    leaves = {name: torch.randn(s, device="cuda", dtype=dtype) * s[-1] ** -0.5 for name, s in shapes.items()}
    exact = {name: t.double().requires_grad_() for name, t in leaves.items()}
    ours = {name: t.requires_grad_() for name, t in leaves.items()}
    y = operation.fused(ours, "relu")
    gy = torch.zeros_like(y)
    gy[-(tokens % 64) :].normal_()
    y.backward(gy)
    operation.plain(exact, "relu").backward(gy.double())
    for name, leaf in ours.items():
        right = exact[name].grad
        assert (leaf.grad.double() - right).norm() < 0.1 * right.norm(), name
