"""bench/steps.py without a GPU: other plans reach the kernels, and only where they should. Timing is a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import aot
from support.gluon import needs_gluon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common, steps
from fusedmlp import FusedGLUMLP, settings


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(calls: dict[str, common.Call], sets: int, rounds: int) -> dict[str, list[float]]:
        for call in calls.values():
            call(0)
        return {name: [float(10 + i)] * rounds for i, name in enumerate(calls)}

    for metric in steps.METRICS:
        monkeypatch.setattr(common, metric, measure)


def test_every_variant_of_a_pass_is_measured(timed: None) -> None:
    run = steps.Steps(["eager"], device="cpu", sets=1)
    run.shape("geglu", (4, 16, 32))
    run.shape("mlp_relu", (4, 16, 32))
    assert run.raised == {}
    for op in steps.FORWARD:
        for pass_, candidates in steps.CANDIDATES.items():
            found = {r["variant"] for r in run.rows if r["op"] == op and r["pass"] == pass_}
            assert found == {"eager", "plan", *candidates[op]}
    text = steps.table(run.rows)
    assert text.count("[4, 16 -> 32]") == 4
    assert "gradients apart, dX by cuBLAS" in text


def test_plans_are_chosen_by_name(timed: None) -> None:
    run = steps.Steps([], device="cpu", sets=1, passes=["step"], only="weights together")
    run.shape("geglu", (4, 16, 32))
    names = {"plan", "gradients of weights together", "gradients of weights together, dX by cuBLAS"}
    assert {(r["pass"], r["variant"]) for r in run.rows} == {("step", name) for name in names}
    kernels = {arguments[0] for _, arguments in steps.kernel_tasks([("geglu", (4, 16, 32))], "weights together")}
    assert kernels == {"glu_weight_grads"}


def test_what_raises_is_named_and_the_others_are_measured(timed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: dict[str, Any] = {"geglu": {"bad": {"no such kernel": steps.PAIR}}}
    monkeypatch.setattr(steps, "CANDIDATES", {"forward": bad})
    run = steps.Steps(["eager"], device="cpu", sets=1, passes=["forward"])
    run.shape("geglu", (4, 16, 32))
    assert list(run.raised) == ["bad, geglu 4x16x32 forward, warm-up"]
    assert {r["variant"] for r in run.rows} == {"eager", "plan"}


@needs_gluon
@pytest.mark.parametrize("name", steps.STEP["geglu"])
def test_a_plan_replaces_the_kernels_that_it_names_and_no_others(name: str) -> None:
    layer = FusedGLUMLP(2304, 9216, device="meta", dtype=torch.bfloat16)
    x = torch.empty(2048, 2304, device="meta", dtype=torch.bfloat16, requires_grad=True)

    def kernels(plan: steps.Plan) -> list[str]:
        with aot.pretended(aot.DEVICES["nvidia-h200"]) as launched:
            steps.under(plan, lambda _: layer(x).sum().backward())(0)
            return [f"{entry} {entry.grid}" for entry in launched]

    plan = steps.STEP["geglu"][name]
    own, other = kernels({}), kernels(plan)
    assert settings.overridden() == ()
    for op, wanted in plan.items():
        with aot.pretended(aot.DEVICES["nvidia-h200"]):
            shape = {"dual_dgrad": (2304, 9216)}.get(op, (9216, 2304))
            if settings.calculate_settings(op, 2048, *shape, torch.bfloat16, "meta") != wanted:
                assert own != other


def test_kernels_of_other_plans_are_compiled_ahead_once() -> None:
    tasks = steps.kernel_tasks([("geglu", shape) for shape in steps.SHAPES] + [("mlp_relu", (8192, 768, 3072))])
    named = [(arguments[0], arguments[1]) for _, arguments in tasks]
    assert len(set(named)) == len(named)
    wanted = {
        (steps.SAME_KERNEL.get(op, op), s)
        for plans in steps.STEP.values()
        for plan in plans.values()
        for op, s in plan.items()
    }
    assert set(named) == {(op, s) for op, s in wanted if s.family != "pair"}


@pytest.mark.parametrize("text", ["", "8192", "8192x768", "axbxc", "0x1x2", "1x2x3x4"])
def test_a_shape_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        steps.main(["--shapes", text])
    assert ended.value.code == 2
    assert "TOKENSxHIDDENxINTERMEDIATE" in capsys.readouterr().err
