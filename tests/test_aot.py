"""Every shipped configuration compiles ahead of time: no spills, no serialised wgmma, shared memory within limits, and
parameters that the compiled launcher knows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from support.aot import DEVICES, SHARED_MEMORY, Recorded, compile_for, does_less, most_to_do, pretended, ptx_for
from support.gluon import needs_gluon

from fusedmlp import functional, settings
from fusedmlp.settings import OPS, Settings, calculate_settings, tables

MAX_SPILL = 64  # bytes
SERIALISED_WGMMA = {"C7511", "C7515"}  # ptxas: wgmma waits at every step
TWO_CTAS = 128  # registers a thread that leave room for two programs of 8 warps
PAIRED = ("act_grad", "glu_act_backward")
PARTS = 8  # tests that share the launches of one case, so that all workers have work

# Tokens and widths that reach every row of the tables and every branch of the heuristic, which
# test_every_setting_is_among_them checks. All tokens are multiples of 16: others change how M is specialised and
# nothing else of a kernel.
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
WIDTHS = ((64, 256), (384, 1536), (768, 3072), (1024, 4096), (2304, 9216), (4096, 1024))
WIDTHS += ((2048, 8192), (2560, 10240), (4096, 11008), (4096, 14336), (3072, 24576), (8192, 28672))
# Where the heuristic and the tables are asked what they may answer: both sides of every threshold.
ASKED_TOKENS = (1, 16, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025, 2048, 2049, 8192, 8193, 1 << 20)
ASKED_WIDTHS = (32, 64, 72, 384, 768, 1016, 1024, 1032, 1536, 2040, 2048, 2304, 3072, 4096, 8184, 8192, 9216, 14336)


@dataclass(frozen=True)
class Case:
    """Devices of one capability, dtype, whether shapes suit TMA, precision of fp32 products.

    Every activation is compiled with everything on (biases, saving, all gradients), where a kernel needs the most
    registers. ``plain``: the first one also without biases, training and inference. ``whole``: one tile of each kernel
    in every way that it is launched, not only with the most to do.
    """

    devices: tuple[str, ...]
    dtype: torch.dtype
    tma: bool = True
    precision: str = "high"
    activations: tuple[str, ...] = ("gelu",)
    plain: bool = True
    whole: bool = False

    @property
    def capability(self) -> int:
        major, minor = DEVICES[self.devices[0]].capability
        return 10 * major + minor

    @property
    def products(self) -> str:
        """How products in float32 are computed."""
        return "ieee" if self.precision == "highest" else "tf32"

    @property
    def id(self) -> str:
        parts = [f"sm{self.capability}", str(self.dtype).removeprefix("torch."), "aligned" if self.tma else "ragged"]
        return "-".join([*parts, *([self.precision] if self.dtype == torch.float32 else [])])


SM90 = ("nvidia-h200", "nvidia-h100")
CASES = [
    Case(("nvidia-a100",), torch.bfloat16),
    Case(("nvidia-a100",), torch.bfloat16, tma=False, plain=False),
    Case(("nvidia-a100",), torch.float32),
    Case(("nvidia-a100",), torch.float32, precision="highest"),
    Case(SM90, torch.bfloat16, activations=("gelu", "gelu_tanh"), whole=True),
    Case(SM90, torch.float16, activations=("gelu_tanh",), plain=False),
    Case(SM90, torch.bfloat16, tma=False, whole=True),
    Case(SM90, torch.float32),
    Case(("nvidia-b200",), torch.bfloat16),
]


def _run_all(dtype: torch.dtype, tokens: int, D: int, H: int, activation: str, biases: bool, train: bool) -> None:
    """Every operation, forward and with ``train`` backward; of the gated MLP those too that store no activation, and
    that have a frozen weight."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=train)

    x = make(tokens, D)
    gate, up, down = make(H, D), make(H, D), make(D, H)
    b_gate, b_up, b_down = (make(H), make(H), make(D)) if biases else (None, None, None)
    others = b_gate, b_up, b_down, activation
    gated = partial(functional.glu_mlp, x, gate, up, down, *others)
    calls = (
        partial(functional.linear_act, x, gate, b_gate, activation),
        gated,
        # dX has a launch of its own where a weight is frozen.
        *(
            [partial(gated, keep_activation=True), partial(functional.glu_mlp, x, gate.detach(), up, down, *others)]
            if train
            else []
        ),
        partial(functional.mlp, x, gate, down, b_gate, b_down, activation),
        partial(functional.relu_mlp, x, [gate, down], [b_gate, b_down]),
    )
    for call in calls:
        y = call()
        if train:
            y.backward(torch.empty_like(y))


def _settings_of(case: Case, device: str, tokens: int, D: int, H: int) -> tuple[Any, ...]:
    """Everything of a shape that decides what is compiled: its settings, and whether a stack is one launch."""
    tiles = -(-tokens // 32) * -(-max(D, H) // 32)
    chosen = (
        calculate_settings(op, tokens, *sizes, case.dtype, "meta", precision=case.products, tma=case.tma)
        for op, sizes in product(OPS, ((H, D), (D, H)))
    )
    return (tokens <= 256 and tiles <= DEVICES[device].sms, *chosen)


@cache
def recorded_for(case: Case, family: str | None = None) -> list[Recorded]:
    """What the operations of a case launch; of a forced family, that family's kernels."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(case.precision)
    found: dict[Recorded, None] = {}
    runs = [(activation, True, True) for activation in case.activations]
    if case.plain:
        runs += [(case.activations[0], False, train) for train in (True, False)]
    odd = 0 if case.tma else 1
    try:
        for device in case.devices:
            forced = settings.override(**({"family": family} if family else {}))
            with forced, pretended(DEVICES[device]) as recorded:
                # Of shapes with the same settings one launches what all do.
                shapes = {
                    _settings_of(case, device, tokens, D + odd, H + odd): (tokens, D + odd, H + odd)
                    for tokens, (D, H) in product(TOKENS, WIDTHS)
                }
                for shape, run in product(shapes.values(), runs):
                    _run_all(case.dtype, *shape, *run)
            found.update(dict.fromkeys(recorded))
    finally:
        torch.set_float32_matmul_precision(before)
    kept = [entry for entry in found if family is None or entry.name.endswith(f"_{family}")]
    return most_to_do(kept, case.whole)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_compiles_without_spills(case: Case, part: int, capfd: pytest.CaptureFixture[str]) -> None:
    expect_clean([e for e in recorded_for(case) if not has_twin(e, case)][part::PARTS], case.capability, capfd)


def has_twin(entry: Recorded, case: Case) -> bool:
    """Whether a kernel for small batches in float16 is compiled in bfloat16: plain loads and products, where the two
    differ in the type alone."""
    if case.dtype != torch.float16 or not entry.name.endswith("_small"):
        return False
    twin = replace(entry, signature=tuple(kind.replace("fp16", "bf16") for kind in entry.signature))
    (other,) = (c for c in CASES if c.dtype == torch.bfloat16 and (c.devices, c.tma) == (case.devices, case.tma))
    return any(twin == found or does_less(twin, found) for found in recorded_for(other))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != torch.float16], ids=lambda case: case.id)
def test_kernels_for_small_batches_compile(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Forced, since neither the heuristic nor a table need take them; what they do take is compiled above. Where they
    take none, who forces them gets the tile for most tokens."""
    compiled, recorded = set(recorded_for(case)), recorded_for(case, "small")
    if not any(entry.name.endswith("_small") for entry in compiled):
        last = {entry.name: entry.tile for entry in recorded}
        recorded = [entry for entry in recorded if entry.tile == last[entry.name]]
    expect_clean([entry for entry in recorded if entry not in compiled], case.capability, capfd)


def expect_clean(recorded: list[Recorded], capability: int, capfd: pytest.CaptureFixture[str]) -> None:
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
            or not report.launchable
        ):
            bad.append(f"{entry}: {report}")
    assert not bad, f"{len(bad)} of {len(recorded)} launches:\n" + "\n".join(bad)


@needs_gluon
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_grouped_products_compile_without_spills(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    """The heuristic's tile and those of the sweep, forced; of a gated MLP and of one of two layers."""
    found: list[Recorded] = []
    for tile in ({}, {"parts": 1, "stages": 5}, {"parts": 2, "stages": 5}, {"block_m": 64, "stages": 6}):
        with settings.override(family="gluon", **tile), pretended(DEVICES["nvidia-h200"]) as recorded:
            _run_all(dtype, 1024, 768, 3072, "gelu_tanh", False, True)
            found += [entry for entry in recorded if entry.name == "glu_grads_gluon"]
    assert len(found) == 4
    expect_clean(found, 90, capfd)


def test_pointwise_kernels_move_vectors() -> None:
    """Their time is that of memory: one value of 16 bits an access takes twice as long."""
    with settings.override(family="pair"), pretended(DEVICES["nvidia-h200"]) as recorded:
        _run_all(torch.bfloat16, 129, 768, 3072, "gelu", False, True)
        found = [entry for entry in recorded if entry.name in ("act_forward", "glu_act_forward", *PAIRED)]
    assert len({entry.name for entry in found}) == 4
    for entry in found:
        accesses = re.findall(r"(?:ld|st)\.global[.\w]*", ptx_for(entry, 90))
        assert accesses and not [access for access in accesses if access.endswith(".b16")], f"{entry}: {accesses}"


def answers(case: Case) -> set[tuple[str, Settings]]:
    """What the settings may answer on the devices of a case, with the operation asked: tables and heuristic."""
    found = set()
    for slug in case.devices:
        with mock.patch.object(settings.device, "info", return_value=DEVICES[slug]):
            for op, M, N, K in product(OPS, ASKED_TOKENS, ASKED_WIDTHS, ASKED_WIDTHS):
                answer = calculate_settings(op, M, N, K, case.dtype, "meta", precision=case.products, tma=case.tma)
                found.add((op, answer))
        dtype = str(case.dtype).removeprefix("torch.")
        unserved = () if DEVICES[slug].has_wgmma else ("gluon",)
        for (op, name, row_precision, _, _), rows in tables.load(slug).items():
            if name == dtype and row_precision in ("", case.products):
                found |= {
                    (op, row.settings)
                    for row in rows
                    if row.settings.family not in (unserved if case.tma else ("tma", "gluon", "small"))
                }
    return found


SMALL_KERNELS = {
    "glu": "glu_small",
    "glu_backward": "hidden_backward_small",
    "act_backward": "hidden_backward_small",
    "dual_dgrad": "dual_dgrad_small",
    "dgrad": "dual_dgrad_small",
    "linear_act": "linear_small",
    "down": "linear_small",
}


def is_compiled(op: str, wanted: Settings, recorded: list[Recorded]) -> bool:
    tile = (wanted.block_m, wanted.block_n, wanted.block_k, wanted.group, wanted.parts, wanted.warps, wanted.stages)
    op = "linear_act" if op == "linear_relu" else op
    name = op if op == "relu_stack" else f"{op}_{wanted.family}"
    if wanted.family == "small":
        name = SMALL_KERNELS[op]
    if wanted.family == "gluon":
        name = "glu_grads_gluon" if "grads" in op else f"hidden_{'backward' if 'backward' in op else 'forward'}_gluon"
    tiles = [entry.tile for entry in recorded if entry.name == name]
    return any(all(a in (None, b) for a, b in zip(found, tile, strict=True)) for found in tiles)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_setting_is_among_them(case: Case) -> None:
    wanted = {(op, answer) for op, answer in answers(case) if answer.family != "pair"}
    if case.precision == "highest":
        # cuBLAS and pointwise kernels, but for the stack of layers, which the plan does not take then.
        assert {op for op, _ in wanted} == {"relu_stack"}
        assert not [entry for entry in recorded_for(case) if entry.name == "relu_stack"]
        return
    missing = [f"{op}: {answer}" for op, answer in wanted if not is_compiled(op, answer, recorded_for(case))]
    assert not missing, "not compiled:\n" + "\n".join(sorted(missing))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_gated_backward_is_among_them_with_and_without_its_activation(case: Case) -> None:
    stores: dict[Any, set[bool]] = {}
    for entry in recorded_for(case):
        constants = entry.named_constants
        two_layers = constants.get("GATED") is False or "up_desc" in constants  # None there
        if "backward" in entry.name and "STORE_H" in constants and not two_layers:
            rest = tuple(value for name, value in constants.items() if name.isupper() and name != "STORE_H")
            stores.setdefault((entry.name, entry.options, rest), set()).add(constants["STORE_H"])
    assert stores and all(both == {True, False} for both in stores.values()), stores


def test_every_table_belongs_to_a_case() -> None:
    tables_shipped = {path.name.removesuffix(".json") for path in files(settings).iterdir() if path.suffix == ".json"}
    assert tables_shipped <= {slug for case in CASES for slug in case.devices}
    for slug in tables_shipped:
        rows = json.loads((files(settings) / f"{slug}.json").read_text())["rows"]
        dtypes = {str(case.dtype).removeprefix("torch.") for case in CASES if slug in case.devices}
        assert {row["dtype"] for row in rows} <= dtypes
