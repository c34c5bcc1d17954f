"""Every shipped configuration compiles ahead of time: no spills, no serialised wgmma, shared memory within limits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.aot import SHARED_MEMORY, Recorded, compile_for, pretended

from fusedmlp import functional

MAX_SPILL = 64  # bytes
SERIALISED_WGMMA = {"C7511", "C7515"}  # ptxas: wgmma waits at every step
TWO_CTAS = 128  # registers a thread that leave room for two programs of 8 warps
PAIRED = ("act_grad", "glu_act_backward")

# Tokens and widths that reach every branch of the heuristic.
TOKENS = (1, 64, 128, 256, 1024, 2048, 8192)
WIDTHS = ((384, 1536), (768, 3072), (2304, 9216), (4096, 14336))


def _run_all(dtype: torch.dtype, tokens: int, D: int, H: int, activation: str) -> None:
    """Forward with and without grad, backward, of every operation, with and without biases."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

    x = make(tokens, D)
    gate, up, down = make(H, D), make(H, D), make(D, H)
    for b_gate, b_up, b_down in ((None, None, None), (make(H), make(H), make(D))):
        calls = (
            partial(functional.linear_act, x, gate, b_gate, activation),
            partial(functional.glu_mlp, x, gate, up, down, b_gate, b_up, b_down, activation),
            partial(functional.mlp, x, gate, down, b_gate, b_down, activation),
            partial(functional.relu_mlp, x, [gate, down], [b_gate, b_down]),
        )
        for call in calls:
            with torch.no_grad():
                call()
            y = call()
            y.backward(torch.empty_like(y))


def recorded_for(capability: int, dtype: torch.dtype, tma: bool, activations: tuple[str, ...]) -> list[Recorded]:
    with pretended(capability) as recorded:
        for tokens in TOKENS:
            for D, H in WIDTHS:
                for activation in activations:
                    _run_all(dtype, tokens, D if tma else D + 1, H if tma else H + 1, activation)
    return recorded


# capability, dtype, whether shapes suit TMA, matmul precision, activations
CASES = [
    (80, torch.bfloat16, True, "high", ("gelu", "gelu_tanh")),
    (80, torch.float32, True, "high", ("gelu",)),
    (80, torch.float32, True, "highest", ("gelu",)),
    (90, torch.bfloat16, True, "high", ("gelu", "gelu_tanh")),
    (90, torch.float16, True, "high", ("gelu_tanh",)),
    (90, torch.bfloat16, False, "high", ("gelu",)),
    (90, torch.float32, True, "high", ("gelu",)),
    (100, torch.bfloat16, True, "high", ("gelu", "gelu_tanh")),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability,dtype,tma,precision,activations", CASES)
def test_compiles_without_spills(
    capability: int,
    dtype: torch.dtype,
    tma: bool,
    precision: str,
    activations: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        recorded = recorded_for(capability, dtype, tma, activations)
    finally:
        torch.set_float32_matmul_precision(before)
    assert recorded, "nothing was launched"
    bad = []
    for entry in recorded:
        report = compile_for(entry, capability, capfd)
        # These count on two programs of 8 warps a multiprocessor behind their grid barrier.
        resident = dict(entry.options).get("launch_cooperative_grid") and entry.name in PAIRED
        if (
            report.spills > MAX_SPILL
            or report.shared > SHARED_MEMORY[capability]
            or SERIALISED_WGMMA & set(report.warnings)
            or (resident and report.registers > TWO_CTAS)
        ):
            bad.append(f"{entry}: {report}")
    assert not bad, f"{len(bad)} of {len(recorded)} launches:\n" + "\n".join(bad)
