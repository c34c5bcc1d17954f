"""Saved-tensor hooks may hand back copies with other strides, which launches prepared for one layout must not serve."""

import pytest
import torch

from fusedmlp import functional, reference, settings


def _grads(call, x, weights, hooks):
    x = x.detach().requires_grad_()
    weights = [w.detach().requires_grad_() for w in weights]
    if hooks:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.contiguous()):
            y = call(x, *weights)
    else:
        y = call(x, *weights)
    return torch.autograd.grad(y.square().sum(), [x, *weights])


@pytest.mark.parametrize("family", ["pointer", "tma"])
@pytest.mark.parametrize("first", [True, False], ids=["hooks_first", "hooks_last"])
def test_recompute_with_and_without_contiguous_copies(family, first):
    torch.manual_seed(0)
    D, H = 32, 48
    half = torch.float16  # 16 bits: TMA describes no fp32
    x = torch.randn(21, 2 * D).to(half)[:, :D]  # rows apart; the hook returns them packed
    weights = [(torch.randn(*shape) / 6).to(half) for shape in ((H, D), (H, D), (D, H))]

    def ours(x, gate, up, down):
        return functional.glu_mlp(x, gate, up, down, activation="silu", recompute=True)

    def plain(x, gate, up, down):
        return reference.glu_mlp(x, gate, up, down, activation="silu")

    expected = _grads(plain, x, weights, False)
    with settings.override(family=family):
        for hooks in (first, not first, first):
            for found, right in zip(_grads(ours, x, weights, hooks), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
