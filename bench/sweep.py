"""Measure candidate settings of every GEMM kernel on this GPU and write the table that the package reads.

    python bench/sweep.py                     fusedmlp/settings/<gpu>.json and bench/results/<gpu>/sweep.json
    python bench/sweep.py --out FILE --log FILE --tokens 128 1024

Every candidate's result is compared with PyTorch's before it is timed; a candidate that is wrong, does not fit or
does not compile is reported and left out. Times are of CUDA-graph replays over several input sets in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from fusedmlp import plan as plans
from fusedmlp import settings
from fusedmlp.activations import resolve_activation
from fusedmlp.launchers.act import act_backward
from fusedmlp.launchers.glu import dual_dgrad, glu_backward, glu_forward
from fusedmlp.launchers.glu_grads import glu_grads
from fusedmlp.launchers.linear import linear_act
from fusedmlp.launchers.small import down
from fusedmlp.plan import Plan
from fusedmlp.settings.device import info
from fusedmlp.settings.types import SMALL_TOKENS, Settings

WIDTHS = ((384, 1536), (768, 3072), (1024, 4096), (2304, 9216), (4096, 14336))
TOKENS = (16, 64, 128, 1024, 2048, 8192)
SETS = 3  # input sets in turn
CALLS = 4 * SETS  # in a graph, so that its own start is a small part of the time
# cuBLAS and a pointwise kernel are one launch more than a fused kernel, which must pay for itself: about what a
# call of cuBLAS costs the host (22 to 50 were seen), in microseconds. Set with the sweep in view: at 8192 tokens,
# 768 -> 3072, the pair would save 22 in the gated backward, and stays unused.
PAIR_MUST_SAVE = 25.0
# The table may take it where it holds no more memory than eager does; elsewhere it is measured to be compared with.
PAIR_MAY_SERVE = ("glu_backward", "dual_dgrad", "glu_grads")
# Of these the pair need not pay for itself. Three separate products against one launch: where they are the faster the
# device is busy long enough to hide the host. The last product: cuBLAS alone is one launch too.
PAIR_IS_FREE = ("glu_grads", "down")
WORST = 1.5e-2  # relative error against PyTorch in bf16; roundings differ, formulas must not


def tma(m: int, n: int, k: int, parts: int, warps: int, stages: int, ctas: int) -> Settings:
    return Settings("tma", m, n, k, parts=parts, warps=warps, stages=stages, ctas_per_sm=ctas)


def small(n: int, k: int, stages: int, splits: int = 1, warps: int = 4) -> Settings:
    """For small batches; block_m follows the tokens."""
    return Settings("small", 0, n, k, parts=splits, warps=warps, stages=stages)


def gluon(m: int, n: int, k: int, parts: int, warps: int, stages: int) -> Settings:
    return Settings("gluon", m, n, k, parts=parts, warps=warps, stages=stages)


CANDIDATES = {
    "glu": (
        Settings("pair"),
        gluon(128, 128, 64, 1, 8, 4),
        gluon(128, 128, 64, 2, 8, 4),
        gluon(128, 64, 64, 1, 4, 6),
        gluon(128, 64, 64, 1, 4, 5),
        gluon(64, 128, 64, 1, 4, 4),
        gluon(64, 64, 64, 1, 4, 6),
        tma(128, 128, 64, 1, 8, 4, 1),
        tma(128, 64, 64, 1, 4, 3, 2),
        tma(128, 64, 64, 1, 8, 5, 1),
        tma(64, 64, 64, 1, 4, 4, 2),
        tma(64, 128, 64, 1, 8, 4, 1),
        tma(64, 64, 128, 1, 4, 4, 1),
        tma(64, 32, 128, 1, 4, 4, 2),
        tma(64, 32, 64, 1, 4, 5, 3),
        tma(64, 16, 128, 1, 4, 4, 3),
        small(64, 64, 5),
        small(64, 64, 4),
        small(64, 128, 3),
        small(64, 128, 4),
        small(32, 64, 5),
        small(32, 128, 3),
        small(32, 128, 4),
        small(32, 256, 3),
        small(16, 128, 4),
        small(16, 256, 3),
        small(128, 64, 4, warps=8),
    ),
    "down": (
        Settings("pair"),
        small(64, 64, 5, 2),
        small(64, 64, 5, 4),
        small(64, 64, 5, 8),
        small(64, 64, 5, 12),
        small(64, 128, 4, 2),
        small(64, 128, 4, 4),
        small(64, 128, 4, 8),
        small(32, 64, 5, 4),
        small(32, 128, 4),
        small(32, 128, 4, 2),
        small(32, 128, 4, 4),
        small(32, 128, 4, 6),
        small(32, 256, 3, 2),
        small(16, 256, 3),
        small(16, 256, 3, 2),
    ),
    "glu_backward": (
        Settings("pair"),
        gluon(128, 128, 64, 2, 4, 4),
        gluon(128, 128, 64, 4, 4, 4),
        gluon(64, 128, 64, 2, 4, 4),
        gluon(64, 128, 64, 4, 4, 4),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 4, 8, 4, 1),
        tma(128, 64, 64, 2, 4, 4, 2),
        tma(128, 64, 64, 4, 4, 4, 2),
        tma(128, 64, 64, 1, 8, 4, 1),
        tma(64, 128, 64, 2, 4, 4, 2),
        tma(64, 128, 64, 4, 4, 4, 2),
        tma(64, 64, 64, 1, 4, 4, 2),
        tma(64, 64, 64, 2, 4, 4, 3),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 32, 128, 1, 4, 4, 2),
    ),
    "glu_grads": (
        Settings("pair"),
        gluon(128, 128, 64, 2, 4, 6),
        gluon(128, 128, 64, 2, 4, 5),
        gluon(128, 128, 64, 1, 4, 5),
        gluon(64, 128, 64, 2, 4, 6),
    ),
    "dual_dgrad": (
        Settings("pair"),
        tma(128, 256, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 4, 3, 2),
        tma(128, 128, 128, 2, 8, 3, 1),
        tma(128, 64, 64, 1, 4, 4, 2),
        tma(128, 64, 128, 1, 4, 4, 1),
        tma(64, 128, 64, 1, 4, 4, 2),
        tma(64, 128, 128, 1, 4, 4, 1),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 64, 128, 1, 4, 6, 1),
        tma(64, 32, 128, 1, 4, 4, 2),
        tma(64, 16, 128, 1, 4, 5, 2),
        tma(256, 128, 64, 2, 8, 4, 1),
        tma(128, 256, 64, 1, 8, 3, 1),
    ),
    "linear_act": (
        Settings("pair"),
        gluon(128, 128, 64, 1, 4, 4),
        gluon(128, 128, 64, 2, 4, 6),
        gluon(128, 256, 64, 4, 8, 4),
        gluon(64, 128, 64, 2, 4, 6),
        tma(128, 256, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 4, 3, 2),
        tma(128, 64, 64, 1, 4, 4, 2),
        tma(64, 128, 64, 1, 4, 4, 2),
        tma(64, 64, 64, 1, 4, 4, 3),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 32, 128, 1, 4, 4, 2),
        tma(64, 16, 128, 1, 4, 4, 3),
    ),
    "act_backward": (
        Settings("pair"),
        gluon(128, 128, 64, 2, 4, 4),
        gluon(128, 128, 64, 4, 4, 4),
        gluon(64, 128, 64, 2, 4, 4),
        tma(128, 128, 64, 2, 8, 4, 1),
        tma(128, 128, 64, 2, 4, 3, 2),
        tma(128, 64, 64, 2, 4, 4, 2),
        tma(128, 64, 64, 1, 4, 4, 2),
        tma(64, 128, 64, 2, 4, 4, 2),
        tma(64, 64, 64, 1, 4, 4, 3),
        tma(64, 64, 128, 1, 4, 3, 2),
        tma(64, 32, 128, 1, 4, 4, 2),
    ),
}


PASS = {
    "glu": "forward",
    "down": "forward",
    "linear_act": "forward",
    "glu_backward": "backward",
    "glu_grads": "backward",
    "dual_dgrad": "backward",
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
        if op not in ("glu", "down", "glu_backward", "glu_grads", "dual_dgrad"):
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
    if op == "glu_grads":
        both = torch.cat([p.gate, p.up])
        return p.dgate_up @ both, p.dgate_up.t() @ p.x, p.gy.t() @ p.h
    gelu = torch.nn.functional.gelu
    if op == "glu":
        return gelu(p.x @ p.gate.t(), approximate="tanh") * (p.x @ p.up.t())
    if op == "down":
        return p.h @ p.down.t()
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
        return common.relative_error(found, expected.double())
    errors = [common.relative_error(f, e.double()) for f, e in zip(found, expected, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def candidates(op: str, M: int) -> list[Settings]:
    """Those that can serve M tokens."""
    padded = 16 if M <= 16 else 32 if M <= 32 else 64
    found = [c for c in CANDIDATES[op] if c.family != "small" or M <= SMALL_TOKENS]
    return [replace(c, block_m=padded) if c.family == "small" else c for c in found]


def sweep(op: str, M: int, D: int, H: int, dtype: torch.dtype, rows: list[dict[str, Any]]) -> Settings | None:
    """The fastest right candidate at one shape; a row for each that ran."""
    problems = [Problem.make(M, D, H, dtype) for _ in range(SETS)]
    expected = run_torch(op, problems[0])
    best: tuple[float, Settings] | None = None
    for candidate in candidates(op, M):
        try:
            plan = plan_of(op, problems[0], candidate)
            found = worst_error(run_ours(op, plan, problems[0]), expected)
            if not found < WORST:
                raise ArithmeticError(f"relative error {found}")
            call = partial(run_in_turn, op, plan, problems)
            times = common.graph_us({"ours": call}, CALLS, rounds=4)["ours"]
        except Exception as reason:  # a candidate that does not fit this GPU is a result, not an end
            print(f"  left out: {op} [{M}, {D} -> {H}] {candidate}: {type(reason).__name__}: {str(reason)[:100]}")
            continue
        rows.append(common.row(op, PASS[op], (M, D, H), str(candidate), "graph_us", times))
        cost = rows[-1]["median"]
        if candidate.family == "pair" and op not in PAIR_IS_FREE:
            cost += PAIR_MUST_SAVE if op in PAIR_MAY_SERVE else float("inf")
        if best is None or cost < best[0]:
            best = (cost, candidate)
            shown = f"{op:13s} [{M:5d}, {D:4d} -> {H:5d}] {rows[-1]['median']:8.1f} us  {candidate}"
    if best is not None:
        print(shown, flush=True)
    return best[1] if best else None


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows, and the old ones of shapes that were not measured this time."""

    def shape(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("op", "dtype", "precision", "M", "N", "K"))

    measured = {shape(row) for row in new}
    return [row for row in old if shape(row) not in measured] + new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--widths", nargs="+", default=[f"{d},{h}" for d, h in WIDTHS], metavar="D,H")
    parser.add_argument("--ops", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--out", help="the table (default: fusedmlp/settings/<gpu>.json)")
    parser.add_argument("--log", help="all measurements (default: bench/results/<gpu>/sweep.json)")
    args = parser.parse_args()
    try:
        gpu = common.need_gpu()
    except common.BenchError as error_:
        print(error_, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    measured: list[dict[str, Any]] = []
    table: list[dict[str, Any]] = []
    for op in args.ops:
        for width in args.widths:
            D, H = (int(n) for n in width.split(","))
            for M in args.tokens:
                found = sweep(op, M, D, H, torch.bfloat16, measured)
                plans.clear()
                if found is None:
                    continue
                N, K = (D, H) if op in ("dual_dgrad", "down") else (H, D)
                for dtype in ("bfloat16", "float16"):  # operands of one size at one tensor-core rate
                    row = {"op": op, "dtype": dtype, "precision": "", "M": M, "N": N, "K": K}
                    table.append({**row, "settings": asdict(found)})
    slug = info(torch.device("cuda")).slug
    shipped = common.ROOT / "fusedmlp" / "settings" / f"{slug}.json"
    out = Path(args.out) if args.out else shipped
    table = merged(json.loads(shipped.read_text())["rows"] if shipped.is_file() else [], table)
    lines = ",\n".join(json.dumps(row) for row in table)
    out.write_text(f'{{"gpu": {json.dumps(gpu)}, "rows": [\n{lines}\n]}}\n')
    log = common.write(common.result("sweep", measured, common.ceilings(), gpu), args.log)
    print(f"{len(table)} rows to {out}, {len(measured)} measurements to {log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
