"""What the stateless layers of :mod:`fusedmlp.layers` do with the module that adopted their forward.

The module's own class says what is meant: its forward is read once an instance (:mod:`fusedmlp._stand_in`). Where it is
what the layer computes, the kernels get the weights of its Linears; everywhere else the class's own forward runs, so
that nothing but the speed can change. What was read is looked at again in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import explain, functional
from ._children import first_reason, has_global_hooks, has_hooks, is_plain_tensor, plain_parts
from ._eager_form import Step, applied_function, is_child_call, is_input
from ._stand_in import CONSTANTS, Absent, Mutable, OfClass, Recorded, record_forward
from .activations import Activation, activation_of_module

# What an activation or a dropout can be told: the form of a GELU, a probability.
OPTIONS = ("approximate", "p")


class Reading(NamedTuple):
    """What one module's forward was found to be.

    Attributes:
        linears: its Linears in the order of the operation.
        own: in their place, the names of the module's own weight and bias, if it has them itself.
        activation: our name of it.
        watched: the other children that it calls (activations, dropouts that are off), with the class and the options
            of each.
        reads: attributes that it read, with their values.
        reason: why it is not of the kind asked for; "" where it is.
    """

    linears: tuple[str, ...]
    own: tuple[str, ...]
    activation: str
    watched: tuple[tuple[str, type[nn.Module], Any], ...]
    reads: tuple[tuple[str, Any], ...]
    reason: str


def unread(reason: str) -> Reading:
    """That of a module whose forward could not be read: its class's forward runs for good."""
    return Reading((), (), "", (), (), reason)


class _Match(NamedTuple):
    """A form that fits: the children that are its Linears, or the module's own parameters, and the activation."""

    linears: tuple[str, ...]
    own: tuple[str, ...]
    activation: Activation


class _Cached(NamedTuple):
    forward: Callable[..., Tensor]  # of the class, which may be patched
    children: tuple[tuple[str, nn.Module], ...]  # the watched ones themselves
    reading: Reading


_cache: dict[str, WeakKeyDictionary[nn.Module, _Cached]] = {
    "glu_mlp": WeakKeyDictionary(),
    "mlp": WeakKeyDictionary(),
    "linear_act": WeakKeyDictionary(),
}


def adopted(op: str, layer: type[nn.Module], module: nn.Module, x: Tensor, allowed: tuple[str, ...]) -> Tensor:
    """The forward of ``module``, by the operation ``op`` where that is what its class computes with one of the
    ``allowed`` activations (none: any), else by its class.

    Raises:
        TypeError: ``module`` is no adopter but a ``layer`` itself, which has no weights.
    """
    own = type(module).forward
    if own is layer.forward:
        name = layer.__name__
        raise TypeError(
            f"{name} has no weights: it is for kernels.kernelize(), which lends its forward to another module; "
            f"use Fused{name} for a layer of its own"
        )
    compiling = torch.compiler.is_compiling()
    reading = _read_while_compiling(op, module) if compiling else read(op, module)
    reason = reading.reason or _why_not_now(module, reading, allowed)
    if not reason:
        arguments = _arguments(module, reading)
        if arguments is not None:
            return _OPERATIONS[op](x, *arguments, reading.activation)
        reason = _why_not_plain(module, reading)
    if not compiling:
        explain.note_eager(op, reason)
    return own(module, x)  # type: ignore[no-any-return]


def suits(op: str, module: nn.Module, allowed: tuple[str, ...]) -> bool:
    """Whether the class of ``module`` computes ``op`` with one of the ``allowed`` activations (none: any)."""
    reading = read(op, module)
    return not (reading.reason or _why_not_now(module, reading, allowed))


def read(op: str, module: nn.Module) -> Reading:
    """What ``module`` computes; read anew where the class's forward, other children or what it read have changed."""
    cached = _cache[op].get(module)
    if cached is not None and cached.forward is type(module).forward:
        children = module._modules
        for name, child in cached.children:
            if children.get(name) is not child:
                break
        else:
            if not cached.reading.reads or all(_same(module, *item) for item in cached.reading.reads):
                return cached.reading
    reading = read_anew(op, module)
    watched = tuple([(name, module._modules[name]) for name, _, _ in reading.watched])
    _cache[op][module] = _Cached(type(module).forward, watched, reading)  # type: ignore[arg-type]
    return reading


def _read_while_compiling(op: str, module: nn.Module) -> Reading:
    """The same for traced code, from what it can see of the module and is guarded by: compiled code then serves every
    module that is alike, not one object."""
    from ._described import read_described  # needs torch._dynamo, which is there when this is traced

    children = tuple([(name, type(c), options_of(c)) for name, c in module._modules.items() if c is not None])
    parameters = tuple([name for name, value in module._parameters.items() if value is not None])
    known: tuple[tuple[str, Any], ...] = ()
    while True:
        reading, asked_for = read_described(op, type(module), children, parameters, known)
        if asked_for is None:
            return reading  # type: ignore[no-any-return]
        value = getattr(module, asked_for, Absent)
        known += ((asked_for, value if value is Absent or isinstance(value, CONSTANTS) else Mutable),)


def _same(module: nn.Module, name: str, value: object) -> bool:
    if isinstance(value, OfClass):
        return name not in module.__dict__ and getattr(type(module), name, None) == value.function
    found = getattr(module, name, Absent)
    return found is value or (type(found) is type(value) and found == value)


def read_anew(op: str, module: nn.Module) -> Reading:
    """What ``module`` computes, not looking at what was read before."""
    try:
        recorded = record_forward(module)
    except ValueError as error:
        return unread(str(error))
    match = _MATCHERS[op](recorded.form, module)
    if match is None:
        reason = f"{type(module).__name__}.forward computes {recorded.form}, not {_FORMS[op]}"
        return Reading((), (), "", _watched(module, recorded, ()), recorded.reads, reason)
    watched = _watched(module, recorded, match.linears)
    return Reading(match.linears, match.own, match.activation.name, watched, recorded.reads, "")


def _watched(
    module: nn.Module, recorded: Recorded, linears: tuple[str, ...]
) -> tuple[tuple[str, type[nn.Module], Any], ...]:
    others = [(name, module._modules[name]) for name in recorded.called if name not in linears]
    return tuple([(name, type(child), options_of(child)) for name, child in others])  # type: ignore[misc]


def options_of(child: Any) -> Any:
    """The :data:`OPTIONS` of a child."""
    state = child.__dict__
    return state.get("approximate", Absent), state.get("p", Absent)


def _why_not_now(module: nn.Module, reading: Reading, allowed: tuple[str, ...]) -> str:
    """Why a module whose form fits is to be called as eager calls it, as a phrase; "" where nothing stands in the
    way."""
    if allowed and reading.activation not in allowed:
        return f"{type(module).__name__} applies {reading.activation}; this layer computes {' or '.join(allowed)}"
    if has_global_hooks():
        return "hooks are registered for every module"
    # A traced call has just read them, and PyTorch before 2.12 does not trace a comparison with what was read.
    compiling = torch.compiler.is_compiling()
    for name, kind, options in reading.watched:
        child: Any = module._modules.get(name)
        if _is_wrapped(child) or not (compiling or (type(child) is kind and options_of(child) == options)):
            return f"{name} has changed or has a hook"
    return ""


def _is_wrapped(child: nn.Module) -> bool:
    state = child.__dict__
    if has_hooks(state):
        return True
    if "forward" not in state:
        return False
    # kernelize() lends forwards to activations too, which by its contract compute the same.
    return not (hasattr(type(child), "kernel_layer_name") and isinstance(state["forward"], MethodType))


def _arguments(module: nn.Module, reading: Reading) -> tuple[Any, ...] | None:
    """Weights, then biases; None where one of them may not be read."""
    if reading.own:
        parameters = [module._parameters.get(name) for name in reading.own]
        if not all(map(is_plain_tensor, parameters)):
            return None
        return parameters[0], parameters[1] if len(parameters) > 1 else None
    children = module._modules
    weights, biases = [], []
    for name in reading.linears:
        parts = plain_parts(children.get(name))
        if parts is None:
            return None
        weights.append(parts[0])
        biases.append(parts[1])
    return (*weights, *biases)


def _why_not_plain(module: nn.Module, reading: Reading) -> str:
    if reading.own:
        return "a parameter is not a plain Parameter"
    return first_reason(reading.linears, module._modules)


def _glu_form(form: Step, module: nn.Module) -> _Match | None:
    product = form.args[0] if _is_linear(form, module) else None
    if not isinstance(product, Step) or product.op != "mul":
        return None
    for gated, plain in (product.args, product.args[::-1]):
        gate = _linear_act_form(gated, module)
        if gate is not None and _is_linear(plain, module) and is_input(plain.args[0]):
            names = (*gate.linears, str(plain.target), str(form.target))
            return _Match(names, (), gate.activation) if len(set(names)) == 3 else None
    return None


def _mlp_form(form: Step, module: nn.Module) -> _Match | None:
    first = _linear_act_form(form.args[0], module) if _is_linear(form, module) else None
    if first is None or len({*first.linears, form.target}) != 2:
        return None
    return _Match((*first.linears, str(form.target)), (), first.activation)


def _linear_act_form(form: object, module: nn.Module) -> _Match | None:
    if not isinstance(form, Step) or not form.args or not isinstance(form.args[0], Step):
        return None
    act, inner = _activation(form, module), form.args[0]
    if act is None or not inner.args or not is_input(inner.args[0]):
        return None
    if _is_linear(inner, module):
        return _Match((str(inner.target),), (), act)
    own = _own_parameters(inner)
    return _Match((), own, act) if own else None


def _activation(step: Step, module: nn.Module) -> Activation | None:
    if is_child_call(step):
        return activation_of_module(module._modules.get(str(step.target)))
    applied = applied_function(step)
    return None if applied is None else applied[0]


def _is_linear(step: object, module: nn.Module) -> bool:
    """Whether the step calls a Linear, or an adapter around one; each call looks whether it is plain."""
    if not isinstance(step, Step) or not is_child_call(step):
        return False
    child = module._modules.get(str(step.target))
    return isinstance(child, nn.Linear) or isinstance(getattr(child, "base_layer", None), nn.Linear)


def _own_parameters(step: Step) -> tuple[str, ...]:
    """The names of weight and bias, if any, of a step that multiplies by the module's own parameters; else none."""
    if step.op != "call_function" or step.target is not F.linear or step.kwargs:
        return ()
    given = step.args[1:2] if step.args[2:] == (None,) else step.args[1:]
    if not all(isinstance(a, Step) and a.op == "get_attr" for a in given):
        return ()
    return tuple([str(a.target) for a in given])


_MATCHERS: dict[str, Callable[[Step, nn.Module], _Match | None]] = {
    "glu_mlp": _glu_form,
    "mlp": _mlp_form,
    "linear_act": _linear_act_form,
}
_FORMS = {"glu_mlp": "down(act(gate(x)) * up(x))", "mlp": "fc2(act(fc1(x)))", "linear_act": "act(linear(x))"}
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "glu_mlp": functional.glu_mlp,
    "mlp": functional.mlp,
    "linear_act": functional.linear_act,
}
