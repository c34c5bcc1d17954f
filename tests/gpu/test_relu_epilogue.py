"""cuBLAS with bias and ReLU in its epilogue: no further from float64 than two launches of PyTorch, NaN and inf alike.

Which of its kernels cuBLAS takes depends on the shape, so there are many.
"""

import pytest
import torch
import torch.nn.functional as F

from fusedmlp import functional, settings

pytestmark = pytest.mark.gpu

WIDTHS = ((64, 256), (384, 1536), (768, 3072), (1152, 4304), (2304, 9216), (4096, 1024), (8192, 768))
TOKENS = (1, 2, 7, 16, 33, 64, 100, 128, 250, 256, 512, 777, 1024, 2049)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_as_in_two_launches(widths, dtype):
    K, N = widths
    weight = torch.randn(N, K, device="cuda", dtype=dtype) * K**-0.5
    bias = torch.randn(N, device="cuda", dtype=dtype)
    weight[3, 5], weight[7, 1], bias[11], bias[12], bias[13] = torch.nan, torch.inf, torch.nan, torch.inf, -torch.inf
    for tokens in TOKENS:
        x = torch.randn(tokens, K, device="cuda", dtype=dtype)
        x[tokens // 2, K // 3], x[-1, 2] = torch.nan, -torch.inf
        with torch.no_grad(), settings.override("linear_act", family="pair"):
            found = functional.linear_act(x, weight, bias, "relu")
        right = F.relu(F.linear(x, weight, bias))
        for kind in (torch.isnan, torch.isposinf):
            assert torch.equal(kind(found), kind(right)), f"{tokens} tokens: {kind.__name__}"
        finite = torch.isfinite(right)
        exact = torch.relu(F.linear(x.double(), weight.double(), bias.double()))[finite]
        errors = [(value[finite].double() - exact).norm() for value in (found, right)]
        assert errors[0] <= 1.25 * errors[1] + 1e-6 * exact.norm(), f"{tokens} tokens: {errors}"
