"""Compile the kernels ahead of time, for GPUs that are not there.

What the package would launch is recorded rather than written down again: the operations run on meta tensors with a
pretended device, and each launch is compiled for that device with the argument types it was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from fusedmlp import launch, launchers, plan, settings, steady
from fusedmlp.launchers import glu as glu_launcher
from fusedmlp.settings.device import DeviceInfo

SHARED_MEMORY = {
    80: 166_912,
    90: 232_448,
    100: 232_448,
}  # bytes a block; CUDA C++ guide, technical specifications
# Of capability 9.0 one model with a table of measured settings and one without, where the heuristic decides.
DEVICES = {
    "nvidia-a100": DeviceInfo("nvidia-a100", (8, 0), 108),
    "nvidia-h100": DeviceInfo("nvidia-h100", (9, 0), 132),
    "nvidia-h200": DeviceInfo("nvidia-h200", (9, 0), 132),
    "nvidia-b200": DeviceInfo("nvidia-b200", (10, 0), 148),
}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}


@dataclass(frozen=True)
class Recorded:
    """A launch as it would have been made: the kernel, its argument types and its options."""

    kernel: Any
    signature: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    # Those of one of the calls: sizes of tensors are no part of what is compiled.
    tiles: dict[int, launch.Tile] = field(compare=False)
    pairs: set[int] = field(compare=False)
    arguments: int = field(compare=False)
    grid: int = field(compare=False)

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def named_constants(self) -> dict[str, Any]:
        return {self.kernel.arg_names[i]: value for i, value in self.constants}

    @property
    def tile(self) -> tuple[int | None, ...]:
        """Of a matrix product: block_m, block_n, block_k, group, parts, warps, stages; None what a kernel lacks."""
        names, options = self.named_constants, dict(self.options)
        block = [names.get(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
        if self.name in ("hidden_forward_gluon", "hidden_backward_gluon"):  # their descriptors tell the block
            rows, weight = self.tiles[0].block, self.tiles[1].block
            block = [rows[0], weight[0 if "forward" in self.name else 1], rows[1]]
        return (*block, names.get("GROUP"), names.get("PARTS"), options["num_warps"], options.get("num_stages"))

    def __str__(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.named_constants.items() if k.isupper() and v is not None)
        return f"{self.name}[{self.signature[0]}]({shown},{dict(self.options)})"


@dataclass(frozen=True)
class Report:
    """What ptxas said of a kernel. Bytes of spill stores and of shared memory; warnings by number.

    ``launchable``: its parameters are what the compiled launcher takes them to be.
    """

    registers: int
    spills: int
    shared: int
    warnings: tuple[str, ...]
    launchable: bool


def does_less(entry: Recorded, other: Recorded) -> bool:
    """Whether a launch is another one with less to do: flags that are off, operands that are not there."""
    if entry == other or (entry.kernel, entry.options) != (other.kernel, other.options):
        return False
    mine, theirs = dict(entry.constants), dict(other.constants)
    typed = range(len(entry.signature))
    if any(i not in mine and entry.signature[i] != other.signature[i] for i in typed):
        return False  # of other blocks, or numbers that are constant there
    if not theirs.keys() <= mine.keys() or not set(entry.divisible) <= set(other.divisible):
        return False

    def is_less(i: int) -> bool:
        if i not in theirs or mine[i] == theirs[i]:
            return i in theirs or mine[i] is None
        if entry.kernel.arg_names[i] == "STORE_H":  # made again, or not: neither is less to do
            return False
        exact = (mine[i], theirs[i]) == ("gelu_tanh", "gelu")  # the exact one needs more registers
        return exact or (mine[i] is False and theirs[i] is True)

    return all(map(is_less, mine))


def most_to_do(recorded: list[Recorded], first_whole: bool) -> list[Recorded]:
    """Without the launches that do less than others. ``first_whole``: of one tile of each kernel all are there."""
    first = {entry.name: entry.tile for entry in reversed(recorded)} if first_whole else {}
    few = [entry for entry in recorded if entry.tile != first.get(entry.name)]
    less = {entry for entry in few if any(does_less(entry, other) for other in few)}
    return [entry for entry in recorded if entry not in less]


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_NAMES[value.dtype]}"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _tile_type(tile: launch.Tile, value: Any, gluon: bool) -> str:
    tensor = value[0] if isinstance(value, tuple) else value
    layout = f",{launch.gluon_layout(tile, tensor)!r}" if gluon else ""
    return f"tensordesc<{_NAMES[tensor.dtype]}[{','.join(map(str, tile.block))}]{layout}>"


def record(sink: list[Recorded]) -> Any:
    """A stand-in for ``Launch.__call__`` that writes the launch down."""

    def call(self: launch.Launch, device_index: int | None, *args: Any) -> None:
        kernel = self.kernel
        signature: list[str] = []
        constants: list[tuple[int, Any]] = []
        divisible: list[int] = []
        for i, value in enumerate(args):
            if i in self.tiles:
                signature.append(_tile_type(self.tiles[i], value, launch.is_gluon(kernel)))
                continue
            fixed = value is None or (isinstance(value, int) and value == 1)
            if fixed and not kernel.params[i].do_not_specialize:
                signature.append("constexpr")
                constants.append((i, value))
                continue
            signature.append(_type_of(value))
            if isinstance(value, Tensor):
                divisible.append(i)
            elif isinstance(value, int) and value % 16 == 0 and not kernel.params[i].do_not_specialize:
                divisible.append(i)
        for i, value in enumerate(self.constants, start=len(args)):
            signature.append("constexpr")
            constants.append((i, value))
        if len(signature) != len(kernel.arg_names):
            raise AssertionError(f"{kernel.fn.__name__} takes {kernel.arg_names}, got {len(signature)} values")
        options = tuple(sorted(self.options.items()))
        pairs = {i for i, value in enumerate(args) if isinstance(value, tuple)}
        seen_as = dict(self.tiles), pairs, len(args), self.grid
        entry = Recorded(kernel, tuple(signature), tuple(constants), tuple(divisible), options, *seen_as)
        if entry not in sink:
            sink.append(entry)

    return call


@contextmanager
def pretended(info: DeviceInfo) -> Iterator[list[Recorded]]:
    """Meta tensors take the kernels' way as if they lay on that GPU; yields what was launched, each once."""
    recorded: list[Recorded] = []

    def finish(self: plan.Plan) -> None:
        self.device_index = 0
        self.fast_math = self.dtype != torch.float32
        self.dot_precision = self.precision or "ieee"
        self.launchers = None
        self.pairs = False

    with ExitStack() as stack:
        for module in (settings.device, plan, launchers.common, launchers.gluon, launchers.small):
            stack.enter_context(mock.patch.object(module, "info", return_value=info))
        stack.enter_context(mock.patch.object(plan, "why_eager", return_value=None))
        stack.enter_context(mock.patch.object(plan.Plan, "__post_init__", finish))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        stack.enter_context(mock.patch.object(launch.Launch, "__call__", record(recorded)))
        # Nor is a call written down for the compiled launcher, as it would be where that meets PyTorch's CUDA build.
        stack.enter_context(mock.patch.object(steady, "table", return_value=None))
        # Meta tensors lie nowhere, so that they have no distance.
        stack.enter_context(mock.patch.object(glu_launcher, "pair_order", return_value=False))
        plan.clear()
        yield recorded
    plan.clear()


def _source(entry: Recorded) -> Any:
    kernel = entry.kernel
    signature = dict(zip(kernel.arg_names, entry.signature, strict=True))
    constants = {(i,): value for i, value in entry.constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i in entry.divisible}
    kind = GluonASTSource if launch.is_gluon(kernel) else ASTSource
    return kind(kernel, signature, constants, attributes)


def _compiled(entry: Recorded, capability: int) -> Any:
    return triton.compile(_source(entry), target=GPUTarget("cuda", capability, 32), options=dict(entry.options))


def cubin_for(entry: Recorded, capability: int) -> bytes:
    """The machine code of one recorded launch."""
    return bytes(_compiled(entry, capability).asm["cubin"])


def ptx_for(entry: Recorded, capability: int) -> str:
    """Its assembly, as it is handed to ptxas."""
    return str(_compiled(entry, capability).asm["ptx"])


def compile_for(entry: Recorded, capability: int, capfd: Any) -> Report:
    """Compile one recorded launch; the log of ptxas is read from stdout, through pytest's ``capfd``."""
    capfd.readouterr()
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = _compiled(entry, capability)
    log = capfd.readouterr().out
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise AssertionError(f"no ptxas report for {entry}: {log[:500]!r}")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    warnings = tuple(sorted(set(re.findall(r"C7\d\d\d", log))))
    spec = launch._kernel_spec(compiled, 1, entry.arguments, entry.tiles, entry.pairs)
    return Report(max(registers), max(spills), compiled.metadata.shared, warnings, spec is not None)
