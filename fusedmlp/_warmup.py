"""``fusedmlp.warmup``: plans, compiled kernels and prepared launches made ahead of the calls that need them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._children import has_global_hooks, is_plain_tensor, why_any_not_plain
from ._glu import FusedGLUMLP
from ._linear_act import FusedLinearAct, FusedReLUMLP
from ._mlp import FusedMLP
from .checks import autocasting
from .counters import supply_graphs
from .explain import PlanNote, recording
from .integrations._dense_act import FusedDenseAct

# The Linear children whose weights a layer reads; of itself where there are none.
_CHILDREN: dict[type[nn.Module], Callable[[Any], tuple[str, ...]]] = {
    FusedGLUMLP: lambda layer: ("gate_proj", "up_proj", "down_proj"),
    FusedMLP: lambda layer: ("fc1", "fc2"),
    FusedReLUMLP: lambda layer: layer.layer_names,
    FusedDenseAct: lambda layer: ("dense",),
    FusedLinearAct: lambda layer: (),
}


@dataclass(frozen=True)
class Prepared:
    """One kind of call.

    Attributes:
        layers: the names, in the module, of the layers whose calls it serves.
        tokens: their number.
        training: whether the backward is prepared too.
        note: which way such calls go, as :func:`fusedmlp.explain_plan` says it.
    """

    layers: tuple[str, ...]
    tokens: int
    training: bool
    note: PlanNote


@dataclass
class WarmupReport:
    """What :func:`warmup` did; ``str()`` gives it as text.

    Attributes:
        prepared: the kinds of calls.
        skipped: names of fused layers that call their children as eager does, and why: nothing is to be prepared.
        seconds: how long it took.
    """

    prepared: list[Prepared] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = []
        for p in self.prepared:
            passes = "forward and backward" if p.training else "forward"
            more = f" and {len(p.layers) - 1} more" if len(p.layers) > 1 else ""
            way = "fused" if p.note.path == "fused" else f"eager, {p.note.reason}"
            lines.append(f"{p.layers[0] or 'the module itself'}{more}: {p.note.op} {p.note.shape}, {passes}: {way}")
        lines += [f"{name or 'the module itself'}: skipped, {reason}" for name, reason in self.skipped.items()]
        return "\n".join([*lines, f"{self.seconds:.1f} s"])


def warmup(
    module: nn.Module,
    token_counts: int | Iterable[int],
    *,
    dtype: torch.dtype | None = None,
    training: bool | None = None,
) -> WarmupReport:
    """Compile and load what calls with these numbers of tokens need, so that no call and no CUDA graph capture has to.

    Calls every fused layer inside ``module`` with zeros [tokens, width], contiguous as inputs mostly are, on the
    layer's device. The gradients, hooks, buffers, mode and weights of ``module`` and the random state stay as they
    are. Layers that differ in nothing a kernel depends on are called once.

    Args:
        module: any module; layers made by ``patch()`` count.
        token_counts: the numbers of tokens (the product of all dimensions but the last) that calls will have.
        dtype: what calls will compute in where that is not the weights' dtype, as under autocast.
        training: whether the backward is prepared too, for the parameters that require gradients and the input; None
            means in the layers that are in training mode.

    Returns:
        What was prepared, and which layers were skipped.

    Raises:
        TypeError: an argument is of another type than its annotation says.
        ValueError: ``module`` has no fused layer, ``token_counts`` is empty or holds a number below 1, or ``dtype`` is
            no floating-point type.
        RuntimeError: a CUDA graph is being captured.
    """
    counts = _checked(module, token_counts, dtype, training)
    begin = time.perf_counter()
    report = WarmupReport()
    kinds: dict[Any, tuple[nn.Module, list[str]]] = {}
    for name, layer in _fused_layers(module):
        reason = _why_skipped(layer)
        if reason is not None:
            report.skipped[name] = reason
        else:
            kinds.setdefault(_kind(layer), (layer, []))[1].append(name)
    with torch.inference_mode(False):
        for layer, names in kinds.values():
            backward = layer.training if training is None else training
            backward = backward and not any(t.is_inference() for t in _tensors(layer))  # which cannot be trained
            for tokens in counts:
                with recording() as notes:
                    for twin in _twins(layer, dtype):
                        _call(twin, tokens, backward, autocast=dtype is None)
                report.prepared.append(Prepared(tuple(names), tokens, backward, notes[0]))
    for device in {_tensors(layer)[0].device for layer, _ in kinds.values()}:
        if device.type == "cuda":
            supply_graphs(device)
            torch.cuda.synchronize(device)
    report.seconds = time.perf_counter() - begin
    return report


def _checked(module: object, token_counts: object, dtype: object, training: object) -> list[int]:
    """The token counts, in order and once each."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if isinstance(token_counts, int):
        token_counts = [token_counts]
    if isinstance(token_counts, (str, bytes)) or not isinstance(token_counts, Iterable):
        raise TypeError(f"token_counts must be an int or ints, got {type(token_counts).__name__}: {token_counts!r}")
    counts = list(dict.fromkeys(token_counts))
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"token_counts must hold ints, got {type(count).__name__}: {count!r}")
        if count < 1:
            raise ValueError(f"token_counts must be at least 1 each, got {count}")
    if not counts:
        raise ValueError("token_counts is empty; allowed: one number of tokens or more")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {type(dtype).__name__}: {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.bfloat16, got {dtype}")
    if training is not None and not isinstance(training, bool):
        raise TypeError(f"training must be True, False or None, got {type(training).__name__}: {training!r}")
    if not _fused_layers(module):
        raise ValueError(
            f"{type(module).__name__} has no fused layer: nothing to prepare. Make one (FusedGeGLUMLP, ...), or call "
            f"fusedmlp.patch(module) first"
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup() was called inside a CUDA graph capture; call it before the capture")
    return counts


def _fused_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds: tuple[type[nn.Module], ...] = tuple(_CHILDREN)
    return [(name, found) for name, found in module.named_modules() if isinstance(found, kinds)]


def _class(layer: nn.Module) -> type[nn.Module]:
    return next(kind for kind in _CHILDREN if isinstance(layer, kind))


def _why_skipped(layer: nn.Module) -> str | None:
    """Why a layer would call its children as eager does, or None."""
    if has_global_hooks():
        return "hooks are registered for every module"
    names = _CHILDREN[_class(layer)](layer)
    reason = why_any_not_plain(names, layer._modules)
    if reason is not None:
        return reason
    if not names and not all(p is None or is_plain_tensor(p) for p in _parts(layer)):
        return "its weight is not a plain Parameter"
    return None


def _parts(module: nn.Module) -> list[Any]:
    """Weight and bias of a module that owns them: Parameters, or plain tensors where a wrapper flattened those."""
    state, parameters = module.__dict__, module._parameters
    return [parameters[n] if n in parameters else state.get(n, f"no {n}") for n in ("weight", "bias")]


def _tensors(layer: nn.Module) -> list[Tensor]:
    """All weights and biases, a weight first."""
    names = _CHILDREN[_class(layer)](layer)
    owners = [layer._modules[n] for n in names] if names else [layer]
    return [t for owner in owners if owner is not None for t in _parts(owner) if isinstance(t, Tensor)]


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """All that plans and kernels depend on: the layer's own settings, and how its tensors lie in memory."""
    options = [(k, v) for k, v in layer.__dict__.items() if not k.startswith("_") and isinstance(v, (str, int, tuple))]
    tensors = _tensors(layer)
    places = [(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16, t.requires_grad) for t in tensors]
    present = [[isinstance(t, Tensor) for t in _parts(m)] for m in layer.modules() if "weight" in m._parameters]
    pair = [layer._modules[n] for n in ("gate_proj", "up_proj")] if isinstance(layer, FusedGLUMLP) else []
    order = [_parts(m)[0].data_ptr() for m in pair if m is not None]
    return _class(layer), repr(options), repr(places), repr(present), order == sorted(order)


def _twins(layer: nn.Module, dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """Layers that are called in a layer's place: of the same memory, but with nothing of its hooks and gradients.

    With another dtype its weights are copies, as autocast makes them. What a kernel for gate and up is compiled to may
    depend on which of them lies first, and the copies of later calls may lie in either order.
    """
    twin = _twin(layer, dtype)
    yield twin
    first = _tensors(layer)[0]
    if dtype not in (None, first.dtype) and isinstance(layer, FusedGLUMLP):
        gate, up = twin._modules["gate_proj"], twin._modules["up_proj"]
        if gate is not None and up is not None and gate.weight.shape == up.weight.shape:
            gate.weight, up.weight = up.weight, gate.weight
            yield twin


def _twin(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    def own(t: Tensor | None) -> nn.Parameter | None:
        return (
            None
            if t is None
            else nn.Parameter(t.detach().to(dtype or t.dtype), t.requires_grad and not t.is_inference())
        )

    made = copy.copy(module)
    state = made.__dict__
    state["_parameters"] = {name: own(p) for name, p in module._parameters.items()}
    state["_modules"] = {name: None if m is None else _twin(m, dtype) for name, m in module._modules.items()}
    for name in ("weight", "bias"):
        if isinstance(state.get(name), Tensor):
            state[name] = own(state[name])
    return made


def _call(layer: nn.Module, tokens: int, backward: bool, autocast: bool) -> None:
    """A forward without gradients, and one with them and its backward, on zeros."""
    weight = _tensors(layer)[0]
    forward = _class(layer).forward
    kind = weight.device.type
    with torch.autocast(kind, enabled=False) if not autocast and autocasting(kind) else nullcontext():
        x = torch.zeros(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            y = forward(layer, x)
        if backward:
            wanted = [x.requires_grad_(), *[t for t in _tensors(layer) if t.requires_grad]]
            with torch.enable_grad():
                torch.autograd.grad(forward(layer, x), wanted, torch.zeros_like(y))
