"""Steady calls: what ran once for operands of a layout is a program of the compiled launcher from then on.

A table (``_launcher.Table``) of an operation knows its operands by their layout and by everything else that a plan,
the checks and a program depend on. The first call with a layout takes the long way and compiles; the second writes
down what it does (:mod:`fusedmlp.record`); those after it are one call of C. Where the launcher is not built, where
PyTorch offers no DLPack exchange interface (2.9), or where a call cannot be written down, every call takes the long
way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from . import _children, checks, explain, saving, settings
from . import plan as plans
from .plan import Plan
from .program import specify
from .record import Record

MAX_ATTEMPTS = 8  # to write down calls of one plan, which may differ in more than the plan's key
_launcher: Any = None
_connected: bool | None = None
_tables: dict[Any, Any] = {}
Options = tuple[str, str, bool, bool]  # operation, activation, recompute, keep_activation
by_options: dict[Options, Any] = {}  # tables again, by what a module knows of its calls
paused: list[None] = []  # not empty: every call takes the long way
_busy = (explain._recorders, settings.active, paused)  # none of them must have anything in it


def _connect() -> bool:
    """Whether tables can serve; tells the launcher, the first time, what it asks of PyTorch."""
    global _launcher, _connected
    _connected = False
    try:
        from . import launch
    except ImportError:  # no Triton
        return False
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    allocate = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
    release = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)
    if launch._launcher is None or not launch.known_triton() or capsule is None or allocate is None or release is None:
        return False
    try:
        launch._launcher.connect(
            tensor_type=Tensor,
            parameter_type=torch.nn.Parameter,
            linear_type=torch.nn.Linear,
            global_hooks=_children.GLOBAL_HOOKS,
            exchange=capsule,
            grad_enabled=torch.is_grad_enabled,
            dispatch_modes=checks._dispatch_modes,
            tracing_state=checks._tracing_state,
            transforms_active=checks._transforms_active,
            forward_ad=checks._forward_ad,
            hooks=launch._runtime,
            busy=_busy,
            precision=plans.fp32_precision,
            allocate=allocate,
            release=release,
        )
    except (RuntimeError, ValueError):  # an exchange interface of another version or name
        return False
    _launcher = launch._launcher
    _connected = True
    return True


def available() -> bool:
    """Whether steady calls are possible in this process."""
    return _connect() if _connected is None else _connected


def table(op: str, activation: str, save: int) -> Any:
    """The table of an operation, or None where calls cannot be steady."""
    key = (op, activation, save)
    found = _tables.get(key)
    if found is None and available():
        found = _tables.setdefault(key, _launcher.Table(_pair(op, 1)))
    return found


def served(options: Options, children: dict[str, Any], names: tuple[str, ...], x: Tensor) -> Tensor | None:
    """The result of a module's steady call on x, from its Linears of these names; None where it goes the long way."""
    if _connected is False or torch.compiler.is_compiling() or checks.any_autocast():
        return None
    found = by_options.get(options)
    if found is None:
        op, activation, recompute, keep = options
        found = table(op, activation, saving.level(recompute, keep))
        if found is None:
            return None
        by_options[options] = found
    return found.call_linears(children, names, x)  # type: ignore[no-any-return]


def backward_table(op: str) -> Any:
    """A table for the operands of a backward: the upstream gradient, then those of the forward."""
    return _launcher.Table(_pair(op, 2))


def _pair(op: str, first: int) -> int:
    """Where gate and up are among the operands: one descriptor spans them, from the lower in memory on."""
    return first if op == "glu_mlp" else -1


def clear() -> None:
    """Forget every program."""
    for found in list(_tables.values()):
        found.clear()


plans.on_clear.append(clear)


def ripe(plan: Plan, kind: str) -> bool:
    """Whether to write a call of this plan down now: its kernels are compiled, and it was not tried in vain too often.

    ``kind`` tells calls with other kernels apart.
    """
    calls = plan.calls[kind] = plan.calls.get(kind, 0) + 1
    return calls >= 2 and plan.attempts < MAX_ATTEMPTS and available() and _served(plan) and not _watched()


def _served(plan: Plan) -> bool:
    """Whether a table would answer on the current device; inside a capture launches take counters of their own."""
    if plan.device_index is None or torch._C._cuda_getDevice() != plan.device_index:
        return False
    return not torch.cuda.is_current_stream_capturing()


def _watched() -> bool:
    """Whether a table would not answer now, so that each such call would be written down again, or whether a call is
    not what it is at other times: functions of PyTorch, or settings, are replaced."""
    from . import launch

    if any(_busy) or launch._hooked() or checks.plain(()) is not None:
        return True
    # set_default_device() is such a mode too, and changes nothing here.
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def add(plan: Plan, table: Any, value: Any, bound: bool, operands: Sequence[Tensor | None]) -> None:
    """Use a program, or a callable, for operands like these from now on."""
    if not table.add(value, bound, *operands):  # more dimensions than a table knows
        plan.attempts += 1


def write_down(
    plan: Plan, run: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor | None], single: bool = False
) -> tuple[Sequence[Tensor | None], Any, bool] | None:
    """``(what run returned, program of it or None, whether that is bound to the stream)``; None where memory ran out: a
    record holds all that is made to its end, and without one there may be room enough.

    The program takes ``inputs`` and returns what run returned as a tuple; ``single``: the only one, alone.
    """
    record, outputs = Record(inputs), None
    with suppress(torch.OutOfMemoryError), record:
        outputs = run()
    if outputs is None:
        plan.attempts = MAX_ATTEMPTS
        return None
    program = _build(plan, record, outputs, len(inputs), single)
    if program is None:
        plan.attempts += 1
    return outputs, program, record.bound


def _build(plan: Plan, record: Record, outputs: Sequence[Tensor | None], inputs: int, single: bool) -> Any:
    spec = specify(record, outputs, inputs)
    if spec is None:
        return None
    kept = (tuple(s.launch for s in spec.launches), tuple(record.constants.values()))
    try:
        kernels = _launcher.Plan(plan.device_index, len(spec.slots), spec.kernels)
        given = kernels, spec.inputs, spec.values, spec.slots, spec.steps, spec.outputs
        return _launcher.Program(*given, single, kept)
    except ValueError:  # more steps or arguments than a program may have
        return None
