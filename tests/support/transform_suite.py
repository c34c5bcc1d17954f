"""Double backward with shared operands, batched gradients, tracers, dispatch modes, negative bits, odd layouts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fusedmlp import FusedGeGLUMLP, explain_plan, functional, reference

D, H = 16, 24


def tensors(device, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator) / 3).to(device).requires_grad_() for shape in shapes]


def close(found, right, what=""):
    assert len(found) == len(right)
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5, msg=lambda text, i=i: f"{what} {i}: {text}")


def both(call):
    """The same call over ours and over the plain meaning."""
    return call(functional), call(reference)


class TransformSuite:
    device = torch.device("cpu")

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_operands_that_depend_on_each_other(self, create_graph):
        """Tied gate and up, a weight used in two calls, a weight made from x."""
        x, w, down = tensors(self.device, (5, D), (D, D), (D, D))

        def run(module):
            tied = module.glu_mlp(x, w, w, down, activation="silu")
            twice = module.linear_act(module.linear_act(x, w, None, "gelu"), w, None, "silu")
            made = module.linear_act(x, torch.tanh(x.t() @ x), None, "gelu_tanh")
            loss = (tied.square() + twice + made.square()).sum()
            return torch.autograd.grad(loss, [x, w, down], create_graph=create_graph)

        close(*both(run))

    def test_gradient_penalty(self):
        x, gate, up, down = tensors(self.device, (5, D), (H, D), (H, D), (D, H))

        def run(module):
            y = module.glu_mlp(x, gate, up, down, activation="silu")
            (gx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return torch.autograd.grad(gx.square().sum(), [x, gate, up, down])

        close(*both(run))

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_hooks_of_operands_run_once(self, create_graph):
        x, w = tensors(self.device, (5, D), (H, D))
        calls = []
        h = x * 2
        h.register_hook(lambda g: calls.append(1) or g * 2)
        y = functional.linear_act(h, w, None, "silu")
        torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        assert len(calls) == 1

    def test_batched_gradients(self):
        x, w = tensors(self.device, (3, D), (4, D))

        def run(module):
            y = module.linear_act(x, w, None, "gelu").sum(0)
            eye = torch.eye(4, device=self.device)
            return torch.autograd.grad(y, [x, w], eye, is_grads_batched=True)

        close(*both(run))

    def test_gradient_with_its_negative_bit_set(self):
        x, w = tensors(self.device, (5, D), (H, D))

        def run(module):
            y = module.linear_act(x, w, None, "silu")
            z = torch.complex(y, torch.ones_like(y)).conj().imag + torch.complex(torch.ones_like(y), y).conj().imag
            return torch.autograd.grad((z * torch.arange(H, device=self.device)).sum(), [x, w])

        close(*both(run))

    def test_input_with_its_negative_bit_set(self):
        x, w = tensors(self.device, (5, D), (H, D))
        view = torch._neg_view(x.detach())
        assert view.is_neg()
        close(*both(lambda module: [module.linear_act(view, w, None, "silu")]))

    def test_traces_hold_real_operations(self):
        from torch.fx.experimental.proxy_tensor import make_fx

        x, w = (t.detach() for t in tensors(self.device, (5, D), (H, D)))
        graph = make_fx(lambda x, w: functional.linear_act(x, w, None, "silu"))(x, w)
        close([graph(x + 1, w)], [reference.linear_act(x + 1, w, None, "silu")], "make_fx")

    @pytest.mark.filterwarnings("ignore")
    def test_jit_trace_holds_real_operations(self):
        module = FusedGeGLUMLP(D, H, device=self.device)
        (x,) = (t.detach() for t in tensors(self.device, (5, D)))
        traced = torch.jit.trace(module, x, check_trace=False)
        with torch.no_grad():
            close([traced(x + 1)], [module(x + 1)], "jit.trace")

    def test_flop_counter_sees_the_products(self):
        from torch.utils.flop_counter import FlopCounterMode

        x, w = (t.detach() for t in tensors(self.device, (5, D), (H, D)))
        with FlopCounterMode(display=False) as counter:
            functional.linear_act(x, w, None, "silu")
        assert counter.get_total_flops() == 2 * 5 * D * H

    def test_sparse_weights_go_pytorchs_way(self):
        x, w = (t.detach() for t in tensors(self.device, (5, D), (H, D)))
        sparse = w.to_sparse_csr()
        close([functional.linear_act(x, sparse, None, "silu")], [reference.linear_act(x, w, None, "silu")])
        assert "sparse" in str(explain_plan(functional.linear_act, x, sparse, None, "silu"))

    def test_missing_operands_are_named(self):
        (w,) = tensors(self.device, (H, D))
        with pytest.raises(TypeError, match="x must be a torch.Tensor, got NoneType"):
            functional.linear_act(None, w)
        with pytest.raises(TypeError, match="gate_weight must be a torch.Tensor, got NoneType"):
            functional.glu_mlp(w, None, w, w)

    def test_biases_may_change_before_backward(self):
        """As in eager, where nothing keeps them; with recompute they are needed again, and a change is an error."""
        x, w, bias = tensors(self.device, (5, D), (H, D), (H,))
        y = functional.linear_act(x, w, bias, "silu")
        with torch.no_grad():
            bias.add_(1)
        torch.autograd.grad(y.sum(), [x, w, bias])

    def test_result_may_change_in_place(self):
        for shape in ((5, D), (2, 5, D)):
            x, w = tensors(self.device, shape, (H, D))

            def run(module, x=x, w=w):
                y = module.linear_act(x, w, None, "silu")
                y += 1
                return torch.autograd.grad(y.square().sum(), [x, w])

            close(*both(run))

    @pytest.mark.filterwarnings("ignore")
    def test_transforms_under_compile(self):
        x, w = (t.detach() for t in tensors(self.device, (5, D), (H, D)))
        tangent = torch.ones_like(x)

        def jvp(x):
            return torch.func.jvp(lambda x: functional.linear_act(x, w, None, "silu"), (x,), (tangent,))[1]

        right = torch.func.jvp(lambda x: reference.linear_act(x, w, None, "silu"), (x,), (tangent,))[1]
        close([torch.compile(jvp, backend="eager")(x)], [right], "jvp")

    def test_export_keeps_training(self):
        """Exported without grad, then trained: what forward did not keep is made again."""
        module = FusedGeGLUMLP(D, H, device=self.device)
        (x,) = (t.detach() for t in tensors(self.device, (5, D)))
        with torch.no_grad():
            exported = torch.export.export(copy.deepcopy(module), (x,), strict=False).module()
        exported(x).sum().backward()
        module(x).sum().backward()
        right = dict(module.named_parameters())
        for name, parameter in exported.named_parameters():
            assert isinstance(parameter.grad, Tensor)
            close([parameter.grad], [right[name].grad], name)
