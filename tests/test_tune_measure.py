"""What measure() does with candidates, on a CPU: operands and timing are stand-ins, their results are not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.aot import DEVICES, pretended
from torch import Tensor

from fusedmlp.settings.types import Settings
from fusedmlp.tune import measure, timing
from fusedmlp.tune.candidates import CANDIDATES, candidates, sizes
from fusedmlp.tune.files import DeviceLost

M, D, H = 8, 16, 32
make = measure.Problem.make


def problem(M: int, D: int, H: int, dtype: torch.dtype, device: str = "cpu") -> measure.Problem:
    return make(M, D, H, dtype, device)


@pytest.mark.usefixtures("gluon_serves")
@pytest.mark.parametrize("op", CANDIDATES)
def test_the_plan_that_is_measured_takes_the_candidate(op: str):
    """Each candidate becomes the settings under the name that measure() looks at."""
    with pretended(DEVICES["nvidia-h200"]):
        for candidate in candidates(op, 64, True, True):
            found = measure.plan_of(op, problem(64, 96, 192, torch.bfloat16, "meta"), candidate)
            assert found.settings[measure.KERNEL[op]] == candidate
            name, N, K, _ = found.asked[measure.KERNEL[op]]
            assert (name, (N, K)) == (op, sizes(op, 96, 192))


@pytest.mark.parametrize("op", CANDIDATES)
def test_pytorchs_result_is_that_of_autograd(op: str):
    p = problem(M, D, H, torch.float64)
    gelu = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    gate_up, pre = p.gate_up.clone().requires_grad_(), p.pre.clone().requires_grad_()
    if op == "glu_backward":
        (gelu(gate_up[:, :H]) * gate_up[:, H:] @ p.down.t()).backward(p.gy)
        expected = gate_up.grad
    elif op == "act_backward":
        (gelu(pre) @ p.down.t()).backward(p.gy)
        expected = pre.grad
    elif op in ("glu_grads", "glu_weight_grads"):
        weights = p.dgate_up.t() @ p.x, p.gy.t() @ p.h
        expected = (p.dgate_up @ torch.cat([p.gate, p.up]), *weights) if op == "glu_grads" else weights
    else:
        expected = {
            "down": p.h @ p.down.t(),
            "glu": gelu(p.x @ p.gate.t()) * (p.x @ p.up.t()),
            "linear_act": gelu(p.x @ p.gate.t() + p.bias),
            "linear_relu": torch.relu(p.x @ p.gate.t() + p.bias),
            "dgrad": p.pre @ p.gate,
            "dual_dgrad": p.dgate_up[:, :H] @ p.gate + p.dgate_up[:, H:] @ p.up,
        }[op]
    assert expected is not None
    assert measure.worst_error(measure.run_torch(op, p), expected) < 1e-6


class Bench:
    """In the place of the GPU: what run_ours gives for each candidate, and how long it takes."""

    def __init__(self) -> None:
        self.faults: dict[Settings, Any] = {}
        self.eager: str | None = None
        self.served: Settings | None = None
        self.lost = False
        self.sets: set[int] = set()

    def plan_of(self, op: str, p: measure.Problem, asked: Settings) -> Any:
        return SimpleNamespace(
            eager_reason=self.eager, settings={measure.KERNEL[op]: self.served or asked}, asked=asked
        )

    def run_ours(self, op: str, plan: Any, p: measure.Problem) -> Tensor:
        fault = self.faults.get(plan.asked, 1.0)
        if isinstance(fault, Exception):
            raise fault
        return measure.run_torch(op, p) * fault

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def times_of(self, calls: Any, sets: int, failed: Any) -> Any:
        self.sets.add(sets)
        found = []
        for candidate, call in calls:
            try:
                for i in range(2 * sets):
                    call(i)
                found.append((candidate, [3.0, 1.0, 2.0]))
            except Exception as error:
                failed(candidate, error)
        return found


@pytest.fixture
def bench(gluon_serves: None) -> Iterator[Bench]:
    found = Bench()
    with (
        mock.patch.object(measure, "plan_of", found.plan_of),
        mock.patch.object(measure, "run_ours", found.run_ours),
        mock.patch.object(measure, "times_of", found.times_of),
        mock.patch.object(timing, "l2_bytes", return_value=4096),
        mock.patch.object(measure, "info", return_value=DEVICES["nvidia-h200"]),
        mock.patch.object(measure.Problem, "make", staticmethod(problem)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "synchronize", found.synchronize),
    ):
        yield found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "tf32"])
def test_wrong_and_failing_candidates_are_left_out(bench: Bench, dtype: str):
    served = candidates("glu", M, dtype.endswith("16") and dtype != "tf32", True)
    bad = {served[1]: 1 + 2 * measure.WORST[dtype], served[2]: float("nan"), served[3]: MemoryError("x" * 999)}
    bench.faults = {**bad, served[4]: 1 + measure.WORST[dtype] / 4}
    found = measure.measure("glu", M, D, H, dtype)
    assert [candidate for candidate, _ in found.times] == [c for c in served if c not in bad]
    assert found.medians == [(c, 2.0) for c in served if c not in bad]
    reasons = dict(found.left_out)
    assert set(reasons) == set(bad)
    assert reasons[served[1]].startswith("ArithmeticError: relative error 0")
    assert reasons[served[2]] == "ArithmeticError: relative error nan"
    assert reasons[served[3]] == "MemoryError: " + "x" * 100


@pytest.mark.parametrize("op", CANDIDATES)
def test_input_sets_are_copies_of_what_the_kernel_reads(op: str):
    first = measure.Problem.make(3, 24, 40, torch.bfloat16, "cpu")
    again = first.again(op)
    assert measure.worst_error(measure.run_torch(op, again), measure.run_torch(op, first)) == 0.0
    for name in measure.READS[op]:
        ours, theirs = getattr(first, name), getattr(again, name)
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        assert ours.data_ptr() != theirs.data_ptr() and theirs.data_ptr() % 16 == 0
    poisoned = measure.replace(first, **{n: torch.full_like(getattr(first, n), float("nan")) for n in first.__dict__})
    kept = {name: getattr(first, name) for name in measure.READS[op]}
    assert (
        measure.worst_error(measure.run_torch(op, measure.replace(poisoned, **kept)), measure.run_torch(op, first)) == 0
    )
    for p in (first, again):
        assert p.up.data_ptr() > p.gate.data_ptr()
    assert first.bytes_read(op) == sum(getattr(first, name).numel() * 2 for name in measure.READS[op])


def test_sets_exceed_the_cache(bench: Bench):
    measure.measure("glu", M, D, H, "bfloat16")
    assert bench.sets == {5}  # 2.5 times 4096 bytes over (M D + 2 H D) of two bytes


def test_what_fails_while_it_is_timed_is_left_out(bench: Bench):
    served = candidates("glu", M, True, True)
    runs: list[Settings] = []
    real = bench.run_ours

    def run_ours(op: str, plan: Any, p: measure.Problem) -> Tensor:
        runs.append(plan.asked)
        if plan.asked == served[2] and runs.count(served[2]) > 3:
            raise RuntimeError("CUDA error: too many resources requested")
        return real(op, plan, p)

    with mock.patch.object(measure, "run_ours", run_ours):
        found = measure.measure("glu", M, D, H, "bfloat16")
    assert [candidate for candidate, _ in found.times] == [c for c in served if c != served[2]]
    assert found.left_out == [(served[2], "RuntimeError: CUDA error: too many resources requested")]


def test_what_another_kernel_would_serve_is_left_out(bench: Bench):
    bench.served = CANDIDATES["glu"][5]
    found = measure.measure("glu", M, D, H, "bfloat16")
    assert [candidate for candidate, _ in found.times] == [bench.served]
    bench.served, bench.eager = None, "a weight is not stored row by row"
    found = measure.measure("glu", M, D, H, "bfloat16")
    assert not found.times and "a weight is not stored" in found.left_out[0][1]


@pytest.mark.parametrize("size", [(8, 17, 32), (8, 16, 33)])
def test_rows_that_tma_cannot_describe_get_pointer_kernels(bench: Bench, size: tuple[int, int, int]):
    found = measure.measure("glu", *size, "bfloat16")
    assert {candidate.family for candidate, _ in found.times} == {"pair", "pointer", "small"}


def test_a_lost_device_is_not_a_slow_candidate(bench: Bench):
    bench.lost, bench.faults = True, {CANDIDATES["glu"][1]: RuntimeError("CUDA error")}
    with pytest.raises(DeviceLost, match=r"does not answer after glu bfloat16 \[8, 16 -> 32\], gluon 128x128x64"):
        measure.measure("glu", M, D, H, "bfloat16")


def test_the_precision_is_that_of_the_row(bench: Bench):
    seen = []
    with mock.patch.object(measure, "run_torch", side_effect=measure.run_torch) as called:
        called.side_effect = lambda *_: seen.append(torch.get_float32_matmul_precision()) or torch.ones(M, H)
        torch.set_float32_matmul_precision("medium")
        for dtype in ("float32", "tf32", "bfloat16"):
            seen.clear()
            measure.measure("glu", M, D, H, dtype)
            assert set(seen) == {{"float32": "highest", "tf32": "high", "bfloat16": "medium"}[dtype]}
        assert torch.get_float32_matmul_precision() == "medium"
