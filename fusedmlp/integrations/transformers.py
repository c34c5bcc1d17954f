"""``patch()``: replaces the MLPs of a model that is already built, and ``unpatch()``: puts them back.

``transformers`` itself is never imported: classes are told apart by name and by what their forward computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from .. import saving
from .._children import plain_parts, why_not_plain
from .._load import CheckedLoad
from ..modules import FusedGLUMLP, FusedMLP, FusedReLUMLP
from ._dense_act import FusedDenseAct
from ._tables import DENSE_ACT, DENSE_ACT_BEFORE_5, GATED, LEFT, TWO_LAYER


class _Options(NamedTuple):
    """What ``patch()`` hands on to the layers that know it."""

    recompute: bool
    keep_activation: bool


Converter = Callable[[nn.Module, _Options], nn.Module]

_GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
_LOOKS_LIKE_MLP = re.compile(r"(MLP|Mlp|FeedForward|FFN|Intermediate|DenseActDense|DenseGatedActDense)$")


class Replaced(NamedTuple):
    """One module that was replaced: its qualified name, its class before and after."""

    name: str
    old: str
    new: str


class Left(NamedTuple):
    """One module that looks like an MLP and was left: its qualified name, its class, and why."""

    name: str
    cls: str
    reason: str


class _Swap(NamedTuple):
    parent: nn.Module
    name: str
    old: nn.Module
    new: nn.Module


@dataclass
class PatchReport:
    """What ``patch()`` did; ``str()`` gives a table.

    Attributes:
        replaced: (qualified name, old class name, new class name) of each module that was replaced.
        left: (qualified name, class name, reason) of each module that looks like an MLP and was not.
    """

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _swaps: list[_Swap] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}, left {len(self.left)}"]
        lines += _table([("replaced", "class", "now"), *self.replaced]) if self.replaced else []
        lines += _table([("left", "class", "why"), *self.left]) if self.left else []
        return "\n".join(lines)


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return ["", *(f"  {a or '(the model)':<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)]


def patch(
    model: nn.Module,
    recompute: bool = False,
    *,
    sequential: bool = False,
    extra_classes: Iterable[str | type[nn.Module]] = (),
    keep_activation: bool = False,
) -> PatchReport:
    """Replaces the MLPs of ``model`` by fused ones that share their Linears; parameter names stay.

    A class is tried if its name is in the table of known ones or in ``extra_classes``; then the forward of
    each instance must compute exactly what the fused layer does. Patching twice changes nothing the second
    time.

    Args:
        model: any model; its submodules are looked through.
        recompute: keep less memory for the backward, see :class:`FusedGLUMLP` and :class:`FusedMLP`.
        sequential: replace ``nn.Sequential(Linear, ReLU, Linear, ReLU, ...)`` too. Its parent must call it,
            not index into it.
        extra_classes: more classes, or their names, to try.
        keep_activation: keep more memory for a faster backward of gated MLPs, see :class:`FusedGLUMLP`.

    Returns:
        What was replaced, and what looks like an MLP and was left, with the reason.

    Raises:
        TypeError: ``model`` is no nn.Module, or ``extra_classes`` holds neither names nor classes.
        ValueError: both ``recompute`` and ``keep_activation`` are set.
    """
    saving.level(recompute, keep_activation)
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch() takes an nn.Module, got {type(model).__name__}")
    options, extra = _Options(recompute, keep_activation), _class_names(extra_classes)
    report = PatchReport()
    made: dict[int, nn.Module | str | None] = {}
    if isinstance(_convert(model, options, sequential, extra), nn.Module):
        report.left.append(Left("", type(model).__name__, "it is the model itself; use from_module()"))
    for parent, name, qualified, child in _edges(model, "", set()):
        if id(child) not in made:
            made[id(child)] = _convert(child, options, sequential, extra)
        outcome = made[id(child)]
        if isinstance(outcome, nn.Module):
            report._swaps.append(_Swap(parent, name, child, outcome))
            report.replaced.append(Replaced(qualified, type(child).__name__, type(outcome).__name__))
        elif outcome is not None:
            report.left.append(Left(qualified, type(child).__name__, outcome))
    _apply(report._swaps)
    return report


def _class_names(extra: Iterable[str | type[nn.Module]]) -> frozenset[str]:
    if isinstance(extra, str):
        raise TypeError(f"extra_classes must be a list of classes or names, got the str {extra!r}")
    wrong = [e for e in extra if not isinstance(e, str | type)]
    if wrong:
        raise TypeError(f"extra_classes must hold classes or names, got {wrong!r}")
    return frozenset(e if isinstance(e, str) else e.__name__ for e in extra)


def _edges(parent: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Every (parent, name, qualified name, child), each parent once, not looking into layers of ours."""
    seen.add(id(parent))
    for name, child in parent._modules.items():
        if child is None:
            continue
        yield parent, name, prefix + name, child
        if id(child) not in seen and not isinstance(child, CheckedLoad):
            yield from _edges(child, f"{prefix}{name}.", seen)


def _apply(swaps: list[_Swap]) -> None:
    """Puts the new modules in; all of them or none."""
    done: list[_Swap] = []
    try:
        for swap in swaps:
            done.append(swap)
            swap.new.__dict__["_replaced"] = (swap.old,)  # in a tuple: no child, not in the state_dict
            setattr(swap.parent, swap.name, swap.new)
    except BaseException:
        for swap in done:
            swap.parent._modules[swap.name] = swap.old
        raise


def _convert(module: nn.Module, options: _Options, sequential: bool, extra: frozenset[str]) -> nn.Module | str | None:
    """The fused module; or why there is none, as a phrase; or None where it does not look like an MLP."""
    name = type(module).__name__
    if isinstance(module, CheckedLoad):
        return "it is fused already"
    if type(module) is nn.Sequential:
        kinds = {type(child) for child in module._modules.values()}
        wanted = sequential and nn.Linear in kinds and nn.ReLU in kinds
        return _try(lambda m, _: FusedReLUMLP.from_module(m), module, options) if wanted else None
    if name in LEFT and name not in extra:
        return LEFT[name]
    converter = _converter(module, name, extra)
    if converter is not None:
        return _try(converter, module, options)
    return _why_unknown(module, name)


def _converter(module: nn.Module, name: str, extra: frozenset[str]) -> Converter | None:
    children, tried = set(module._modules), name in extra
    if name in GATED or (tried and children >= set(_GATED_NAMES)):
        return lambda m, options: FusedGLUMLP.from_module(m, **options._asdict())
    if name in TWO_LAYER or (tried and children >= {"fc1", "fc2"}):
        return lambda m, options: FusedMLP.from_module(m, recompute=options.recompute)
    if name in DENSE_ACT or name in DENSE_ACT_BEFORE_5 or (tried and "dense" in children):
        return lambda m, _: FusedDenseAct.from_module(m)
    return None


def _try(converter: Converter, module: nn.Module, options: _Options) -> nn.Module | str:
    reason = _special_reason(module)
    if reason is not None:
        return reason
    for name, child in module._modules.items():
        if isinstance(child, nn.Linear) and plain_parts(child) is None:
            return why_not_plain(name, child) or f"{name} is not a plain nn.Linear"
    try:
        return converter(module, options)
    except (TypeError, ValueError) as error:
        return str(error)


def _special_reason(module: Any) -> str | None:
    sparsity = getattr(module, "activation_sparsity", 0.0)
    if isinstance(sparsity, float | int) and sparsity > 0:
        return f"it keeps only the largest gate values (activation_sparsity={sparsity})"
    return None


def _why_unknown(module: nn.Module, name: str) -> str | None:
    children = module._modules
    gated, pair = all(n in children for n in _GATED_NAMES), "fc1" in children and "fc2" in children
    if gated or pair or ("dense" in children and "intermediate_act_fn" in children):
        ours = set(_GATED_NAMES) if gated else {"fc1", "fc2"} if pair else {"dense"}
        rest = [n for n, c in children.items() if n not in ours and c is not None and any(True for _ in c.parameters())]
        if rest:
            return f"its Linears are part of a larger layer, together with {', '.join(rest)}"
        return f"{name} is not in the table of known classes; name it in extra_classes= to try it"
    if _LOOKS_LIKE_MLP.search(name):
        return f"no fused layer fits {name}; its children are {', '.join(children) or 'none'}"
    return None


def unpatch(target: nn.Module | PatchReport) -> list[str]:
    """Puts the original modules back, of a whole model or of what one ``patch()`` did.

    Children that were replaced in the meantime (an adapter put on ``gate_proj``) and the training flag are
    carried over. Hooks that were registered on a fused layer itself go with it. A place where someone else
    has put another module since is left alone.

    Returns:
        The names of the restored modules: qualified ones for a model, as in the report for a report.

    Raises:
        TypeError: ``target`` is neither a module nor a report.
    """
    if isinstance(target, PatchReport):
        pairs = zip(target._swaps, target.replaced, strict=True)
        places = [(s.parent, s.name, row.name) for s, row in pairs if s.parent._modules.get(s.name) is s.new]
    elif isinstance(target, nn.Module):
        places = [(p, n, q) for p, n, q, child in _edges(target, "", set()) if "_replaced" in child.__dict__]
    else:
        raise TypeError(f"unpatch() takes a model or the report of patch(), got {type(target).__name__}")
    for parent, name, _ in places:
        parent._modules[name] = _original(getattr(parent, name))
    return [qualified for _, _, qualified in places]


def _original(fused: nn.Module) -> nn.Module:
    (old,) = fused.__dict__["_replaced"]
    for name, child in old._modules.items():
        if name in fused._modules:
            old._modules[name] = fused._modules[name]
        elif child is not None:
            child.train(fused.training)
    old.training = fused.training
    return old
