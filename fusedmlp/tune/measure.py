"""Measuring one kernel at one shape on this GPU: right first, then the time of each candidate.

Times are of CUDA-graph replays over several input sets in turn, larger than the L2 cache: a model's weights are not in
it when a layer's turn comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
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
from ..launchers.small import dgrad, down
from ..plan import Plan
from ..settings.device import info
from ..settings.heuristic import tma_dtype
from ..settings.types import FAMILIES, GLUON_ONLY_OPS, Settings
from .candidates import DTYPES, candidates
from .compare import times_of
from .files import DeviceLost
from .timing import Call, input_sets, relative_error

METHOD = "medians of CUDA-graph replays under load, candidates in turn, input sets larger than the L2 cache"
# Relative error against PyTorch in the same dtype; roundings differ, formulas must not.
WORST = {"bfloat16": 1.5e-2, "float16": 4e-3, "float32": 1e-4, "tf32": 4e-3}
# The name under which a plan keeps the settings of each kernel.
KERNEL = {
    "glu": "forward",
    "down": "down",
    "glu_backward": "backward",
    "glu_grads": "grads",
    "glu_weight_grads": "wgrads",
    "dual_dgrad": "dgrad",
    "dgrad": "dgrad",
    "linear_act": "forward",
    "linear_relu": "forward",
    "act_backward": "backward",
}
# What each kernel reads, of a Problem.
READS = {
    "glu": ("x", "gate", "up"),
    "down": ("h", "down"),
    "glu_backward": ("gy", "down", "gate_up"),
    "glu_grads": ("gy", "h", "dgate_up", "x", "gate", "up"),
    "glu_weight_grads": ("gy", "h", "dgate_up", "x"),
    "dual_dgrad": ("dgate_up", "gate", "up"),
    "dgrad": ("pre", "gate"),
    "linear_act": ("x", "gate", "bias"),
    "linear_relu": ("x", "gate", "bias"),
    "act_backward": ("gy", "down", "pre"),
}


def adjacent(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Copies, ``up`` behind ``gate`` in memory: the order of the two is a part of some compiled kernels."""
    size, room = gate.numel(), -(-gate.numel() // 16) * 16  # both start at multiples of 16 bytes
    flat = gate.new_empty(2 * room)
    copies = flat[:size].view_as(gate), flat[room : room + size].view_as(up)
    return copies[0].copy_(gate), copies[1].copy_(up)


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
    def make(cls, M: int, D: int, H: int, dtype: torch.dtype, device: str = "cuda") -> Problem:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device) * scale).to(dtype)

        gate, up = adjacent(normal(H, D, scale=D**-0.5), normal(H, D, scale=D**-0.5))
        return cls(
            normal(M, D),
            gate,
            up,
            normal(D, H, scale=H**-0.5),
            normal(M, D),
            normal(M, H),
            normal(M, 2 * H),
            normal(M, 2 * H),
            normal(H),
            normal(M, H),
        )

    def bytes_read(self, op: str) -> int:
        return sum(getattr(self, name).nbytes for name in READS[op])

    def again(self, op: str) -> Problem:
        """The same values; what the kernel reads lies elsewhere in memory."""
        copies = {name: getattr(self, name).clone() for name in READS[op] if name not in ("gate", "up")}
        if "gate" in READS[op]:
            copies["gate"], copies["up"] = adjacent(self.gate, self.up)
        return replace(self, **copies)


Result = Tensor | tuple[Tensor, ...]


def plan_of(op: str, p: Problem, candidate: Settings) -> Plan:
    act = resolve_activation("relu" if op == "linear_relu" else "gelu_tanh")
    # The separate products are what serves without the launch that groups them: dX by a kernel of ours, as it may be.
    separate = op in GLUON_ONLY_OPS and candidate.family == "pair"
    with settings.override(**({} if separate else asdict(candidate))):
        if op in ("linear_act", "linear_relu", "act_backward", "dgrad"):
            return plans.find("mlp", act, p.x, (p.gate, p.down), (p.bias, None))
        plan = plans.find("glu_mlp", act, p.x, (p.gate, p.up, p.down), (None, None, None))
    if separate:
        plan.settings[KERNEL[op]] = candidate
    return plan


def run_grads(plan: Plan, name: str, p: Problem) -> tuple[Tensor, ...]:
    """dWgate above dWup and dWdown; with "grads" dX before them."""
    if plan.settings[name].family == "gluon":
        dx, dgate_up_weight, ddown = glu_grads(plan, name, p.gy, p.h, p.dgate_up, p.x, p.gate, p.up)
        return (dgate_up_weight, ddown) if dx is None else (dx, dgate_up_weight, ddown)
    ddown = torch.mm(p.gy.t(), p.h)
    before = [dual_dgrad(plan, p.dgate_up, p.gate, p.up)] if name == "grads" else []
    return *before, torch.mm(p.dgate_up.t(), p.x), ddown


def run_ours(op: str, plan: Plan, p: Problem) -> Result:
    act = plan.activation
    if op in GLUON_ONLY_OPS:
        return run_grads(plan, KERNEL[op], p)
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
    if op == "dgrad":
        return dgrad(plan, p.pre, p.gate)
    if op in ("linear_act", "linear_relu"):
        # As in inference: what is kept besides, some activations' input, costs both the fused kernel and the pair.
        return linear_act(plan, "forward", p.x, p.gate, p.bias, act, False)[0]
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
    if op == "glu_weight_grads":
        return p.dgate_up.t() @ p.x, p.gy.t() @ p.h
    gelu = torch.nn.functional.gelu
    if op == "dual_dgrad":
        return torch.addmm(p.dgate_up[:, :H] @ p.gate, p.dgate_up[:, H:], p.up)
    if op == "dgrad":
        return p.pre @ p.gate
    if op == "linear_relu":
        return torch.relu(torch.addmm(p.bias, p.x, p.gate.t()))
    if op == "linear_act":
        return gelu(torch.addmm(p.bias, p.x, p.gate.t()), approximate="tanh")
    dh = (p.gy @ p.down).float()
    grad = resolve_activation("gelu_tanh").grad
    if op == "act_backward":
        return grad(dh, p.pre.float()).to(p.gy.dtype)
    gate, up = p.gate_up[:, :H].float(), p.gate_up[:, H:].float()
    return torch.cat([grad(dh * up, gate), dh * gelu(gate, approximate="tanh")], dim=1).to(p.gy.dtype)


def run_in_turn(op: str, plan: Plan, problems: list[Problem], i: int) -> Result:
    return run_ours(op, plan, problems[i % len(problems)])


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
        times: each right candidate with all its times, in microseconds; one time of a hopeless one.
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


def measure(op: str, M: int, D: int, H: int, dtype: str, families: Sequence[str] = FAMILIES) -> Measured:
    """Every candidate of ``families`` for one kernel of a layer D -> H with M tokens; dtype: a name of :data:`DTYPES`.

    A candidate that is wrong, does not fit or does not compile is left out, with the reason. The right ones are timed
    when all are known.

    Raises:
        DeviceLost: the CUDA context is broken; what remains needs a new process.
        RuntimeError: PyTorch's own result cannot be had, for want of memory for instance.
    """
    torch.manual_seed(0)
    found = Measured()

    def leave_out(candidate: Settings, reason: Exception) -> None:
        text = f"{type(reason).__name__}: {str(reason)[:100]}"
        found.left_out.append((candidate, text))
        _still_there(f"{op} {dtype} [{M}, {D} -> {H}], {candidate}: {text}")

    with precision_of(dtype):
        problem = Problem.make(M, D, H, DTYPES[dtype][0])
        expected = run_torch(op, problem)
        plans_of: list[tuple[Settings, Plan]] = []
        for candidate in candidates_for(op, M, D, H, problem.x.dtype, families):
            try:
                plans_of.append((candidate, _right(op, problem, candidate, expected, WORST[dtype])))
            except Exception as reason:  # a candidate that does not fit this GPU is a result, not an end
                leave_out(candidate, reason)
        del expected
        sets = input_sets(problem.bytes_read(op))
        problems = [problem, *(problem.again(op) for _ in range(sets - 1))]
        calls: list[tuple[Settings, Call]] = [(c, partial(run_in_turn, op, plan, problems)) for c, plan in plans_of]
        found.times = times_of(calls, sets, leave_out)
    plans.clear()  # they hold the launches of every candidate
    return found


def candidates_for(
    op: str, M: int, D: int, H: int, dtype: torch.dtype, families: Sequence[str] = FAMILIES
) -> tuple[Settings, ...]:
    """What of ``families`` may serve one kernel of a layer D -> H with M tokens on the current device."""
    gpu = info(torch.device("cuda", torch.cuda.current_device()))
    tma = gpu.has_tma and tma_dtype(dtype) and D * dtype.itemsize % 16 == 0 and H * dtype.itemsize % 16 == 0
    return tuple(c for c in candidates(op, M, tma, tma and gpu.has_wgmma) if c.family in families)


def _right(op: str, p: Problem, candidate: Settings, expected: Result, worst: float) -> Plan:
    """The candidate's plan, after a run of it.

    Raises:
        NotImplementedError: something else would run. ArithmeticError: its result is wrong. Or what the run raises.
    """
    plan = plan_of(op, p, candidate)
    if plan.eager_reason is not None:
        raise NotImplementedError(plan.eager_reason)
    if plan.settings[KERNEL[op]] != candidate:
        raise NotImplementedError(f"{plan.settings[KERNEL[op]]} would run in its place")
    error = worst_error(run_ours(op, plan, p), expected)
    if not error < worst:
        raise ArithmeticError(f"relative error {error}")
    return plan


def _still_there(culprit: str) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as reason:
        raise DeviceLost(f"the GPU does not answer after {culprit} ({str(reason)[:100]})") from reason
