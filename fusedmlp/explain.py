"""What ran and why: notes that operations leave while somebody records, and a readable report of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import saving

if TYPE_CHECKING:
    from torch import Tensor

    from .plan import Plan
    from .settings import Settings


@dataclass(frozen=True)
class PlanNote:
    """One operation of a recorded call.

    Attributes:
        op: ``linear_act``, ``glu_mlp``, ``mlp`` or ``relu_mlp``.
        path: ``"fused"`` or ``"eager"``.
        reason: why eager; empty for fused.
        shape: tokens, widths and dtype.
        forward, backward: the launches in order, in words (backward: with every gradient asked for).
        settings: the tile settings of our kernels.
        measured: what a settings table says of them against cuBLAS; empty where it says nothing.
        kept: what of the call stays for its backward, in words and MiB; empty for eager.
    """

    op: str
    path: str
    reason: str = ""
    shape: str = ""
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    settings: str = ""
    measured: tuple[str, ...] = ()
    kept: str = ""

    def __str__(self) -> str:
        head = f"{self.op} {self.shape}".rstrip()
        if self.path == "eager":
            return f"{head}: eager, {self.reason}"
        lines = [f"{head}: fused"]
        lines += [f"  forward  {i + 1}. {text}" for i, text in enumerate(self.forward)]
        lines += [f"  backward {i + 1}. {text}" for i, text in enumerate(self.backward)]
        lines.append(f"  kept for backward: {self.kept}")
        lines += [f"  {text}" for text in self.measured]
        return "\n".join(lines)


@dataclass
class Explanation:
    """The notes of one call, in the order they were left; ``str()`` gives the report."""

    notes: list[PlanNote] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.notes:
            return "no operation of fusedmlp ran"
        return "\n".join(str(note) for note in self.notes)


_recorders: list[list[PlanNote]] = []


@contextmanager
def recording() -> Iterator[list[PlanNote]]:
    """Collect the notes of everything that runs inside."""
    notes: list[PlanNote] = []
    _recorders.append(notes)
    try:
        yield notes
    finally:
        _recorders.remove(notes)


def note(entry: PlanNote) -> None:
    for notes in _recorders:
        notes.append(entry)


def note_eager(op: str, reason: str, shape: str = "") -> None:
    """Say that an operation goes PyTorch's way. Costs nothing while nobody records."""
    if _recorders:
        note(PlanNote(op, "eager", reason, shape))


def note_plan(plan: Plan, save: int, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Say which way a call goes, ``save`` the level of :mod:`fusedmlp.saving` that it asks for. Costs nothing while
    nobody records."""
    if not _recorders:
        return
    dtype = str(plan.dtype).removeprefix("torch.")
    precision = f" {plan.precision}" if plan.precision else ""
    widths = (plan.widths[0], *plan.widths[2:]) if plan.op == "glu_mlp" else plan.widths  # gate and up are one step
    shape = f"[{plan.M}, {' -> '.join(map(str, widths))}] {dtype}{precision} {plan.activation.name}"
    if plan.eager_reason is not None:
        note(PlanNote(plan.op, "eager", plan.eager_reason, shape))
        return
    forward, backward = _LAUNCHES[plan.op](plan, save)
    text = "; ".join(f"{n}: {'cuBLAS' if plan.by_cublas(n) else found}" for n, found in _serving(plan).items())
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, *weights, *biases)]
    kept = _kept(plan, plan.kept(save, needs)) if any(needs) else "nothing"
    note(PlanNote(plan.op, "fused", "", shape, forward, backward, text, _measured(plan), kept))


def _kept(plan: Plan, level: int) -> str:
    parts = {"x": plan.widths[0]}
    if level:
        parts |= _KEPT[plan.op](plan, level)
    MiB = plan.M * sum(parts.values()) * plan.dtype.itemsize / 2**20
    return f"{', '.join(f'{name} [{plan.M}, {width}]' for name, width in parts.items())}: {MiB:.1f} MiB"


def _serving(plan: Plan) -> dict[str, Settings]:
    """The settings of the kernels of ours that run."""
    ours = {name: _settings(plan, name) for name in plan.settings if not name.endswith(".apart")}
    if "grads" in ours:  # one launch for several products, or nothing of ours
        for name in ("dgrad", "wgrads") if ours["grads"].family == "gluon" else ("grads",):
            ours.pop(name, None)
        if "wgrads" in ours and ours["wgrads"].family == "pair":
            del ours["wgrads"]
    return {name: s for name, s in ours.items() if s.family != "pair" or not plan.is_product(name)}  # else cuBLAS alone


def _settings(plan: Plan, name: str) -> Settings:
    """Of one kernel; of its stand-in where gate and up differ in a way that one descriptor cannot describe."""
    settings = plan.settings[name]
    if settings.family == "tma" and f"{name}.apart" in plan.settings and not plan.pairs:
        return plan.settings[f"{name}.apart"]
    return settings


def _measured(plan: Plan) -> tuple[str, ...]:
    """How cuBLAS compares with the fused kernel, for each kernel of which a settings table has both times."""
    found = []
    for name, settings in _serving(plan).items():
        row = plan.measured(name) if settings == plan.settings[name] else None
        if row is None or row.pair_ratio is None:
            continue
        if plan.is_alone(name):
            pair = "cuBLAS"
        else:
            pair = "two cuBLAS products" if plan.asked[name][0] == "dual_dgrad" else "cuBLAS and a pointwise kernel"
        at = "" if row.M == plan.M else f" at {row.M} tokens"
        found.append(f"{name}: {pair}: {row.pair_ratio:.2f} of the fused kernel's time (measured{at})")
    return tuple(found)


def explain_plan(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run ``call(*args, **kwargs)`` once (a module, a model, any function) and report every operation's plan."""
    with recording() as notes:
        call(*args, **kwargs)
    return Explanation(notes)


def launches(plan: Plan, save: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The launches of a plan in words, forward and backward (with every gradient asked for); ``save``: the level of
    :mod:`fusedmlp.saving`. Nothing for a plan that goes PyTorch's way."""
    return _LAUNCHES[plan.op](plan, save) if plan.eager_reason is None else ((), ())


def _kernel(plan: Plan, name: str, fused: str, pair: tuple[str, ...]) -> tuple[str, ...]:
    settings = _settings(plan, name)
    if plan.by_cublas(name):
        return (f"cuBLAS {fused}",)
    return pair if settings.family == "pair" else (f"{fused} [{settings}]",)


def _linear_act(plan: Plan, save: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    K, N = plan.widths
    forward = _kernel(plan, "forward", "linear, bias and activation", ("cuBLAS linear", "activation"))
    return forward, ("activation's gradient and bias gradient", "cuBLAS dX", *_weight(plan, "dW", N, K))


def _glu_mlp(plan: Plan, save: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    forward = _kernel(
        plan,
        "forward",
        "gate, up, activation and product",
        ("cuBLAS gate", "cuBLAS up", "activation and product"),
    )
    made = "dGate, dUp, bias gradients" if save == saving.ACTIVATION else "dGate, dUp, activation again, bias gradients"
    hidden = _kernel(plan, "backward", f"dH, {made}", ("cuBLAS dH", made))
    down = _kernel(plan, "down", "down", ("cuBLAS down",))
    again: tuple[str, ...] = ()
    if save == saving.INPUT:
        again = _kernel(plan, "forward", "gate and up again", ("cuBLAS gate again", "cuBLAS up again"))
    D, H, _, D_out = plan.widths
    products = _products(
        plan,
        "dX, dWgate, dWup and dWdown",
        ("dX over gate and up", ("cuBLAS dX of gate", "cuBLAS dX of up, added")),
        "dWgate, dWup and dWdown",
        _weight(plan, "dWdown", D_out, H),
        _weight(plan, "dWgate and dWup", 2 * H, D),
    )
    return (*forward, *down), (*again, *hidden, *products)


def _mlp(plan: Plan, save: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    forward = _kernel(plan, "forward", "fc1, bias and activation", ("cuBLAS fc1", "activation"))
    hidden = _kernel(
        plan,
        "backward",
        "dA, activation's gradient, bias gradients",
        ("cuBLAS dA", "activation's gradient and bias gradients"),
    )
    down = _kernel(plan, "down", "fc2", ("cuBLAS fc2",))
    again = tuple(f"again: {text}" for text in forward) if save == saving.INPUT else ()
    D, H, D_out = plan.widths
    weights = _weight(plan, "dW2", D_out, H), _weight(plan, "dW1", H, D)
    products = _products(plan, "dX, dW1 and dW2", ("dX", ("cuBLAS dX",)), "dW1 and dW2", *weights)
    return (*forward, *down), (*again, *hidden, *products)


def _weight(plan: Plan, text: str, N: int, K: int) -> tuple[str, ...]:
    """A weight gradient [N, K] by cuBLAS."""
    last = plan.last_tokens(N, K)
    if not last:
        return (f"cuBLAS {text}",)
    return f"cuBLAS {text} of the last {last} tokens", f"cuBLAS {text} of the others, added"


def _products(
    plan: Plan,
    all_of_them: str,
    dx: tuple[str, tuple[str, ...]],
    together: str,
    before: tuple[str, ...],
    behind: tuple[str, ...],
) -> tuple[str, ...]:
    """What follows the hidden layer. together: weight gradients of one launch; before, behind: of cuBLAS, around dX."""
    if plan.settings["grads"].family == "gluon":
        return _kernel(plan, "grads", all_of_them, ())
    dgrad = _kernel(plan, "dgrad", *dx)
    if plan.settings["wgrads"].family == "gluon":
        return (*_kernel(plan, "wgrads", together, ()), *dgrad)
    return (*before, *dgrad, *behind)


def _relu_mlp(plan: Plan, save: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    layers = len(plan.widths) - 1
    if "stack" in plan.settings:
        forward: tuple[str, ...] = (f"all {layers} layers [{plan.settings['stack']}]",)
    else:
        forward = tuple(
            text
            for i in range(layers)
            for text in _kernel(
                plan, f"forward.{i}", f"layer {i}: linear, bias and ReLU", (f"cuBLAS layer {i}", f"ReLU {i}")
            )
        )
    backward = [f"layer {layers - 1}: mask and bias gradient"]
    for i in range(layers - 1, -1, -1):
        backward += _weight(plan, f"dW of layer {i}", plan.widths[i + 1], plan.widths[i])
        if i:
            backward += _kernel(
                plan,
                f"backward.{i}",
                f"layer {i}: dX with the mask and bias gradient of layer {i - 1}",
                (f"cuBLAS dX of layer {i}", f"mask and bias gradient of layer {i - 1}"),
            )
    return forward, (*backward, "cuBLAS dX of layer 0")


def _glu_kept(plan: Plan, level: int) -> dict[str, int]:
    H = plan.widths[1]
    return {"gate and up": 2 * H} | ({"activation": H} if level == saving.ACTIVATION else {})


def _layers_kept(plan: Plan, level: int) -> dict[str, int]:
    """Of the layers with an activation, which the second of two has not."""
    widths = plan.widths[1:2] if plan.op == "mlp" else plan.widths[1:]
    what = "result" if plan.activation.saves == "output" else "input of the activation"
    return {f"{what} of layer {i}" if len(widths) > 1 else what: width for i, width in enumerate(widths)}


_KEPT = {"linear_act": _layers_kept, "glu_mlp": _glu_kept, "mlp": _layers_kept, "relu_mlp": _layers_kept}
_LAUNCHES = {"linear_act": _linear_act, "glu_mlp": _glu_mlp, "mlp": _mlp, "relu_mlp": _relu_mlp}
