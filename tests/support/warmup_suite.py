"""``fusedmlp.warmup`` on a device: nothing is left for the calls that follow, and nothing of the module changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedmlp
from fusedmlp import launch, plan

LAYERS = {
    "linear": lambda **o: fusedmlp.FusedLinearAct(32, 48, activation="gelu", **o),
    "geglu": lambda **o: fusedmlp.FusedGeGLUMLP(32, 48, **o),
    "geglu_recompute": lambda **o: fusedmlp.FusedGeGLUMLP(32, 48, bias=True, recompute=True, **o),
    "mlp": lambda **o: fusedmlp.FusedMLP(32, 48, **o),
    "stack": lambda **o: fusedmlp.FusedReLUMLP([32, 48, 16], **o),
}


@contextmanager
def made() -> Iterator[list[str]]:
    """What is prepared inside: plans and launches, by name."""
    found: list[str] = []
    make, initialise = plan._make, launch.Launch.__init__

    def new_plan(op: str, *args: Any) -> plan.Plan:
        found.append(f"a plan of {op}")
        return make(op, *args)

    def new_launch(self: launch.Launch, kernel: Any, *args: Any, **options: Any) -> None:
        found.append(f"a launch of {getattr(kernel, 'fn', kernel).__name__}")
        initialise(self, kernel, *args, **options)

    with mock.patch.object(plan, "_make", new_plan), mock.patch.object(launch.Launch, "__init__", new_launch):
        yield found


def use(module: nn.Module, tokens: int, device: torch.device, training: bool, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, 32, device=device, dtype=dtype)
    with torch.no_grad():
        module(x)
    if training:
        y = module(x.requires_grad_())
        y.backward(torch.randn_like(y))


class WarmupSuite:
    @pytest.fixture(autouse=True)
    def _no_plans(self) -> Iterator[None]:
        plan.clear()
        yield
        plan.clear()

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("name", LAYERS)
    def test_nothing_is_left_for_the_calls_that_follow(self, device, name, training):
        layer = LAYERS[name](device=device)
        with made() as before:
            report = fusedmlp.warmup(layer, (5, 16), training=training)
        assert before
        assert [p.tokens for p in report.prepared] == [5, 16]
        assert {(p.note.path, p.training) for p in report.prepared} == {("fused", training)}
        with made() as after:
            for tokens in (5, 16):
                use(layer, tokens, device, training, torch.float32)
        assert after == []
        with made() as others:  # what was not asked for is not there
            use(layer, 7, device, training, torch.float32)
        assert others

    def test_forward_alone_prepares_no_backward(self, device):
        layer = LAYERS["geglu"](device=device)
        fusedmlp.warmup(layer, 16, training=False)
        with made() as found:
            use(layer, 16, device, True, torch.float32)
        assert any("backward" in name for name in found), found

    @pytest.mark.parametrize("name", ["geglu", "mlp"])
    def test_under_autocast(self, device, name):
        """Weights that autocast makes copies of, in whatever order they lie."""
        layer = LAYERS[name](device=device)
        fusedmlp.warmup(layer, 16, dtype=torch.bfloat16)
        with torch.autocast(device.type, dtype=torch.bfloat16), made() as found:
            kept = []
            for size in (1, 3, 5):  # other addresses for the copies
                kept.append(torch.empty(size, 48, 32, device=device, dtype=torch.bfloat16))
                use(layer, 16, device, True, torch.float32)
        assert [f for f in found if "plan" not in f] == []

    def test_in_inference_mode_and_without_gradients(self, device):
        layer = LAYERS["geglu"](device=device)
        with torch.inference_mode(), torch.no_grad():
            fusedmlp.warmup(layer, 16)
        with made() as found:
            use(layer, 16, device, True, torch.float32)
        assert found == []

    def test_the_module_stays_as_it_is(self, device):
        model = nn.Sequential(nn.BatchNorm1d(32), *[LAYERS[name](device=device) for name in ("mlp", "geglu")])
        model.to(device)
        calls: list[str] = []
        frozen = model[1].fc1.bias.requires_grad_(False)
        for module in (model[1], model[2], model):
            module.register_forward_hook(lambda *_: calls.append("forward"))
            module.register_full_backward_hook(lambda *_: calls.append("backward"))
        for parameter in model[2].parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.register_hook(lambda _: calls.append("parameter"))
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
        model[2].eval()
        state = copy.deepcopy(model.state_dict())
        versions = [p._version for p in model.parameters()]
        modes = [m.training for m in model.modules()]
        random = torch.random.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None

        report = fusedmlp.warmup(model, [4, 16], training=True)

        assert len(report.prepared) == 4 and calls == []
        assert not frozen.requires_grad
        assert [m.training for m in model.modules()] == modes
        assert [p._version for p in model.parameters()] == versions
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model[1].parameters())
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model[2].parameters())
        assert torch.equal(torch.random.get_rng_state(), random[0])
        assert random[1] is None or torch.equal(torch.cuda.get_rng_state(), random[1])
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def test_layers_that_are_alike_are_called_once(self, device):
        model = nn.Sequential(*[LAYERS["mlp"](device=device) for _ in range(4)])
        model[3].requires_grad_(False)
        with made() as found:
            report = fusedmlp.warmup(model, 16, training=True)
        assert [p.layers for p in report.prepared] == [("0", "1", "2"), ("3",)], str(report)
        assert sum("plan" in f for f in found) == 1

    def test_numbers_are_right_afterwards(self, device):
        layer = LAYERS["geglu"](device=device)
        x = torch.randn(16, 32, device=device)
        with torch.no_grad():
            expected = layer(x)
        plan.clear()
        fusedmlp.warmup(layer, 16)
        with torch.no_grad():
            found: Tensor = layer(x)
        assert torch.equal(found, expected)
