"""float32 products follow PyTorch's precision setting at the time of the call, in forward and in backward."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error

import fusedmlp.functional as fused

pytestmark = pytest.mark.gpu

M, K, N = 256, 4096, 512


def tensors():
    torch.manual_seed(0)
    shapes = {"x": (M, K), "weight": (N, K), "gy": (M, N)}
    return {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}


def errors(function, t):
    """Relative errors of the output, dx and dW against fp64; identity, so that no kink hides an error."""
    x, weight = t["x"].clone().requires_grad_(), t["weight"].clone().requires_grad_()
    y = function(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), t["gy"])
    exact = {name: tensor.double() for name, tensor in t.items()}
    wanted = (exact["x"] @ exact["weight"].t(), exact["gy"] @ exact["weight"], exact["gy"].t() @ exact["x"])
    return [relative_error(a, b) for a, b in zip((y, dx, dw), wanted, strict=True)]


def ours(x, weight):
    return fused.linear_act(x, weight, activation="identity")


@pytest.mark.parametrize("values", ["random", "bfloat16"])
def test_error_is_that_of_eager_under_each_setting(values):
    """Switched back and forth in one process; bfloat16-valued x with fp32 weights as well."""
    t = tensors()
    if values == "bfloat16":
        t["x"] = t["x"].bfloat16().float()
    for precision in ("highest", "high", "highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for what, mine, theirs in zip(("y", "dx", "dW"), errors(ours, t), errors(F.linear, t), strict=True):
            assert mine <= 2 * theirs + 1e-7, f"{precision}: {what} off by {mine:.2e}, eager by {theirs:.2e}"


def test_the_looser_setting_is_used():
    """Under "high" the error shows TF32, so that a caller who allowed it gets its speed."""
    t = tensors()
    torch.set_float32_matmul_precision("highest")
    exact = errors(ours, t)
    torch.set_float32_matmul_precision("high")
    assert all(loose > 10 * tight for loose, tight in zip(errors(ours, t), exact, strict=True))


def test_setting_changed_between_forward_and_backward():
    """Backward takes the setting of its own time, as eager's does."""
    t = tensors()
    x = t["x"].clone().requires_grad_()
    torch.set_float32_matmul_precision("high")
    y = ours(x, t["weight"])
    torch.set_float32_matmul_precision("highest")
    y.backward(t["gy"])
    wanted = t["gy"].double() @ t["weight"].double()
    assert relative_error(x.grad, wanted) < 1e-5
