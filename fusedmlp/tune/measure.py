"""Measuring one kernel at one shape on this GPU: right first, then the time of each candidate.

Times are of CUDA-graph replays over several input sets in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor

from .. import plan as plans
from .. import settings
from ..activations import resolve_activation
from ..launchers.act import act_backward
from ..launchers.glu import dual_dgrad, glu_forward
from ..launchers.glu_backward import glu_backward
from ..launchers.glu_grads import glu_grads
from ..launchers.linear import linear_act
from ..launchers.small import down
from ..plan import Plan
from ..settings.device import info
from ..settings.heuristic import tma_dtype
from ..settings.types import Settings
from .candidates import DTYPES, candidates
from .files import DeviceLost
from .timing import graph_us, relative_error

SETS = 3  # input sets in turn
CALLS = 4 * SETS  # in a graph, so that its own start is a small part of the time
ROUNDS = 4
METHOD = f"medians of CUDA-graph replays, {CALLS} calls over {SETS} input sets in turn"
# Relative error against PyTorch in the same dtype; roundings differ, formulas must not.
WORST = {"bfloat16": 1.5e-2, "float16": 4e-3, "float32": 1e-4, "tf32": 4e-3}
# The name under which a plan keeps the settings of each kernel.
KERNEL = {
    "glu": "forward",
    "down": "down",
    "glu_backward": "backward",
    "glu_grads": "grads",
    "dual_dgrad": "dgrad",
    "linear_act": "forward",
    "act_backward": "backward",
}


@dataclass
class Problem:
    """One set of operands of one shape: what each kernel reads, and its result by PyTorch."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gy: Tensor
    h: Tensor
    gate_up: Tensor
    dgate_up: Tensor
    bias: Tensor
    pre: Tensor

    @classmethod
    def make(cls, M: int, D: int, H: int, dtype: torch.dtype) -> Problem:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device="cuda") * scale).to(dtype)

        return cls(
            normal(M, D),
            normal(H, D, scale=D**-0.5),
            normal(H, D, scale=D**-0.5),
            normal(D, H, scale=H**-0.5),
            normal(M, D),
            normal(M, H),
            normal(M, 2 * H),
            normal(M, 2 * H),
            normal(H),
            normal(M, H),
        )


Result = Tensor | tuple[Tensor, ...]


def plan_of(op: str, p: Problem, candidate: Settings) -> Plan:
    act = resolve_activation("gelu_tanh")
    # The separate products are what serves without the launch that groups them: dX by a kernel of ours, as it may be.
    separate = op == "glu_grads" and candidate.family == "pair"
    with settings.override(**({} if separate else asdict(candidate))):
        if op in ("linear_act", "act_backward"):
            return plans.find("mlp", act, p.x, (p.gate, p.down), (p.bias, None))
        plan = plans.find("glu_mlp", act, p.x, (p.gate, p.up, p.down), (None, None, None))
    if separate:
        plan.settings["grads"] = candidate
    return plan


def run_grads(plan: Plan, p: Problem) -> tuple[Tensor, ...]:
    """dX, dWgate above dWup, dWdown."""
    if plan.settings["grads"].family == "gluon":
        dx, dgate_up_weight, ddown = glu_grads(plan, p.gy, p.h, p.dgate_up, p.x, p.gate, p.up)
        assert dx is not None and dgate_up_weight is not None and ddown is not None
        return dx, dgate_up_weight, ddown
    ddown = torch.mm(p.gy.t(), p.h)
    dx = dual_dgrad(plan, p.dgate_up, p.gate, p.up)
    return dx, torch.mm(p.dgate_up.t(), p.x), ddown


def run_ours(op: str, plan: Plan, p: Problem) -> Result:
    act = plan.activation
    if op == "glu_grads":
        return run_grads(plan, p)
    if op == "glu":
        h, _ = glu_forward(plan, p.x, p.gate, p.up, None, None, save=True)
        assert h is not None
        return h
    if op == "down":
        return down(plan, p.h, p.down, None)
    if op == "glu_backward":
        return glu_backward(plan, p.gy, p.down, p.gate_up, True, False, False)[0]
    if op == "dual_dgrad":
        return dual_dgrad(plan, p.dgate_up, p.gate, p.up)
    if op == "linear_act":
        return linear_act(plan, "forward", p.x, p.gate, p.bias, act, True)[0]
    return act_backward(plan, "backward", p.gy, p.down, p.pre, act, True, False, False)[0]


def run_torch(op: str, p: Problem) -> Result:
    H = p.gate.shape[0]
    gelu = torch.nn.functional.gelu
    if op == "glu":
        return gelu(p.x @ p.gate.t(), approximate="tanh") * (p.x @ p.up.t())
    if op == "down":
        return p.h @ p.down.t()
    if op == "glu_grads":
        both = torch.cat([p.gate, p.up])
        return p.dgate_up @ both, p.dgate_up.t() @ p.x, p.gy.t() @ p.h
    gelu = torch.nn.functional.gelu
    if op == "dual_dgrad":
        return torch.addmm(p.dgate_up[:, :H] @ p.gate, p.dgate_up[:, H:], p.up)
    if op == "linear_act":
        return gelu(torch.addmm(p.bias, p.x, p.gate.t()), approximate="tanh")
    dh = (p.gy @ p.down).float()
    grad = resolve_activation("gelu_tanh").grad
    if op == "act_backward":
        return grad(dh, p.pre.float()).to(p.gy.dtype)
    gate, up = p.gate_up[:, :H].float(), p.gate_up[:, H:].float()
    return torch.cat([grad(dh * up, gate), dh * gelu(gate, approximate="tanh")], dim=1).to(p.gy.dtype)


def run_in_turn(op: str, plan: Plan, problems: list[Problem], i: int) -> Result:
    return run_ours(op, plan, problems[i % SETS])


def worst_error(found: Result, expected: Result) -> float:
    """Relative error of a result, or of the worst of several. NaN is the worst of all."""
    if isinstance(found, Tensor):
        assert isinstance(expected, Tensor)
        return relative_error(found, expected.double())
    errors = [relative_error(f, e.double()) for f, e in zip(found, expected, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


@dataclass
class Measured:
    """Of one shape.

    Attributes:
        times: each right candidate with all its times, in microseconds.
        left_out: the others, each with the reason.
    """

    times: list[tuple[Settings, list[float]]] = field(default_factory=list)
    left_out: list[tuple[Settings, str]] = field(default_factory=list)

    @property
    def medians(self) -> list[tuple[Settings, float]]:
        return [(settings, statistics.median(times)) for settings, times in self.times]


@contextmanager
def precision_of(dtype: str) -> Iterator[None]:
    """PyTorch's fp32 products in the precision that a dtype of :data:`DTYPES` means."""
    if DTYPES[dtype][0] != torch.float32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_us(call: Callable[[int], Result]) -> list[float]:
    return graph_us({"ours": call}, CALLS, rounds=ROUNDS)["ours"]


def measure(op: str, M: int, D: int, H: int, dtype: str) -> Measured:
    """Every candidate for one kernel of a layer D -> H with M tokens; dtype: a name of :data:`DTYPES`.

    A candidate that is wrong, does not fit or does not compile is left out, with the reason.

    Raises:
        DeviceLost: the CUDA context is broken; what remains needs a new process.
        RuntimeError: PyTorch's own result cannot be had, for want of memory for instance.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    torch_dtype, _ = DTYPES[dtype]
    torch.manual_seed(0)
    found = Measured()
    with precision_of(dtype):
        problems = [Problem.make(M, D, H, torch_dtype) for _ in range(SETS)]
        expected = run_torch(op, problems[0])
        gpu, size = info(device), problems[0].x.element_size()
        tma = gpu.has_tma and tma_dtype(torch_dtype) and D * size % 16 == 0 and H * size % 16 == 0
        for candidate in candidates(op, M, tma, tma and gpu.has_wgmma):
            try:
                plan = plan_of(op, problems[0], candidate)
                if plan.eager_reason is not None:
                    raise NotImplementedError(plan.eager_reason)
                if plan.settings[KERNEL[op]] != candidate:
                    raise NotImplementedError(f"{plan.settings[KERNEL[op]]} would run in its place")
                error = worst_error(run_ours(op, plan, problems[0]), expected)
                if not error < WORST[dtype]:
                    raise ArithmeticError(f"relative error {error}")
                found.times.append((candidate, time_us(partial(run_in_turn, op, plan, problems))))
            except Exception as reason:  # a candidate that does not fit this GPU is a result, not an end
                text = f"{type(reason).__name__}: {str(reason)[:100]}"
                found.left_out.append((candidate, text))
                _still_there(f"{op} {dtype} [{M}, {D} -> {H}], {candidate}: {text}")
    plans.clear()  # they hold the launches of every candidate
    return found


def _still_there(culprit: str) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as reason:
        raise DeviceLost(f"the GPU does not answer after {culprit} ({str(reason)[:100]})") from reason
