"""What ``from_module()`` takes: reads an eager module and returns its Linears and activation, or refuses.

Every function raises TypeError where the kind of module or child is wrong and ValueError where it computes
something else; the message names what was found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ._children import plain_parts, why_not_plain, why_wrapped
from ._eager_form import Step, is_child_call, is_input, split_activation, traced_form
from ._load import CheckedLoad
from .activations import Activation, resolve_activation

_GLU_NAMES = ("gate_proj", "up_proj", "down_proj")


def read_linear_act(eager: nn.Module, activation: str | Activation | None) -> tuple[nn.Linear, Activation]:
    """The Linear and the activation of ``nn.Sequential(Linear, act)`` or of a bare Linear."""
    _check_kind(eager)
    if isinstance(eager, nn.Sequential):
        step = traced_form(eager)
        found = split_activation(step, eager, activation)
        if found is None or not is_child_call(found[1]) or not is_input(found[1].args[0]):
            raise ValueError(f"expected nn.Sequential(nn.Linear, activation), got one that computes {step}")
        name, act = str(found[1].target), found[0]
        linear = _linear(eager, name)
        _refuse_leftovers(eager, {name})
    else:
        name, linear = "the layer", eager  # type: ignore[assignment]
        if not isinstance(eager, nn.Linear):
            kind = type(eager).__name__
            raise TypeError(f"from_module() takes an nn.Linear or nn.Sequential(nn.Linear, activation), got {kind}")
        if activation is None:
            raise ValueError("from_module(nn.Linear) needs activation=, the name of what follows it")
        act = resolve_activation(activation)
    # Its parameters are taken over without it, so that nothing around it may be lost.
    if plain_parts(linear) is None:
        raise TypeError(f"from_module() takes a plain nn.Linear; {why_not_plain(name, linear)}")
    return linear, act


def read_dense_act(eager: nn.Module, activation: str | Activation | None) -> tuple[nn.Linear, Activation]:
    """dense and the activation of ``act(dense(x))``."""
    _check_kind(eager)
    dense = _linear(eager, "dense")
    _refuse_leftovers(eager, {"dense"})
    form = traced_form(eager)
    found = split_activation(form, eager, activation)
    if found is None or not is_child_call(found[1], "dense") or not is_input(found[1].args[0]):
        raise ValueError(f"{type(eager).__name__}.forward computes {form}; only act(dense(x)) can be replaced")
    return dense, found[0]


def read_glu(eager: nn.Module, activation: str | Activation | None) -> tuple[dict[str, nn.Linear], Activation]:
    """gate_proj, up_proj, down_proj and the activation of ``down_proj(act(gate_proj(x)) * up_proj(x))``."""
    _check_kind(eager)
    linears = {name: _linear(eager, name) for name in _GLU_NAMES}
    _refuse_leftovers(eager, set(_GLU_NAMES))
    form = traced_form(eager)
    act = _glu_activation(form, eager, activation)
    if act is None:
        allowed = "down_proj(act(gate_proj(x)) * up_proj(x))"
        raise ValueError(f"{type(eager).__name__}.forward computes {form}; only {allowed} can be replaced")
    gate, up, down = linears.values()
    _chain(eager, "gate_proj", gate.out_features, "down_proj", down.in_features)
    _chain(eager, "up_proj", up.out_features, "down_proj", down.in_features)
    if gate.in_features != up.in_features:
        sizes = f"gate_proj takes {gate.in_features} features and up_proj {up.in_features}"
        raise ValueError(f"{type(eager).__name__}: {sizes}; they must agree")
    return linears, act


def _glu_activation(form: Step, eager: nn.Module, activation: str | Activation | None) -> Activation | None:
    product = form.args[0] if is_child_call(form, "down_proj") else None
    if not isinstance(product, Step) or product.op != "mul":
        return None
    for gated, plain in (product.args, product.args[::-1]):
        if is_child_call(plain, "up_proj") and is_input(plain.args[0]):
            found = split_activation(gated, eager, activation)
            if found is not None and is_child_call(found[1], "gate_proj") and is_input(found[1].args[0]):
                return found[0]
    return None


def read_mlp(eager: nn.Module, activation: str | Activation | None) -> tuple[nn.Linear, nn.Linear, Activation]:
    """fc1, fc2 and the activation of ``fc2(act(fc1(x)))`` or of ``nn.Sequential(Linear, act, Linear)``."""
    _check_kind(eager)
    if not isinstance(eager, nn.Sequential):
        for name in ("fc1", "fc2"):
            _linear(eager, name)
    form = traced_form(eager)
    found = split_activation(form.args[0], eager, activation) if is_child_call(form) else None
    if found is None or not is_child_call(found[1]) or not is_input(found[1].args[0]):
        allowed = "fc2(act(fc1(x))) or nn.Sequential(Linear, act, Linear)"
        raise ValueError(f"{type(eager).__name__}.forward computes {form}; only {allowed} can be replaced")
    first, second = str(found[1].target), str(form.target)
    if not isinstance(eager, nn.Sequential) and (first, second) != ("fc1", "fc2"):
        raise ValueError(f"{type(eager).__name__}.forward computes {form}; its Linears must be fc1, then fc2")
    fc1, fc2 = _linear(eager, first), _linear(eager, second)
    _refuse_leftovers(eager, {first, second})
    _chain(eager, first, fc1.out_features, second, fc2.in_features)
    return fc1, fc2, found[0]


def read_relu_stack(eager: nn.Module) -> dict[str, nn.Linear]:
    """The Linears, by name and in order, of a module that computes relu(Linear(... relu(Linear(x))))."""
    _check_kind(eager)
    form = step = traced_form(eager)
    linears: dict[str, nn.Linear] = {}
    while not is_input(step):
        found = split_activation(step, eager, None)
        if found is None or found[0].name != "relu" or not is_child_call(found[1]):
            allowed = "a stack of Linear and ReLU, the last Linear followed by a ReLU too,"
            raise ValueError(f"{type(eager).__name__}.forward computes {form}; only {allowed} can be replaced")
        name = str(found[1].target)
        if name in linears:
            raise ValueError(f"{type(eager).__name__} uses {name} twice; each Linear may be used once")
        linears = {name: _linear(eager, name), **linears}
        step = found[1].args[0]
    if not linears:
        raise ValueError(f"{type(eager).__name__} has no nn.Linear")
    _refuse_leftovers(eager, set(linears))
    if [n for n in eager._modules if n in linears] != list(linears):
        order = ", ".join(linears)
        raise ValueError(f"{type(eager).__name__} applies its Linears in another order than it holds them: {order}")
    names = list(linears)
    for first, second in zip(names, names[1:]):
        _chain(eager, first, linears[first].out_features, second, linears[second].in_features)
    return linears


def _check_kind(eager: object) -> None:
    if not isinstance(eager, nn.Module):
        raise TypeError(f"from_module() takes an nn.Module, got {type(eager).__name__}")
    if isinstance(eager, CheckedLoad):
        raise TypeError(f"from_module() takes an eager module; {type(eager).__name__} is fused already")


def _linear(eager: nn.Module, name: str) -> nn.Linear:
    child = eager._modules.get(name)
    if type(child) is nn.Linear:
        return child
    label = type(eager).__name__
    if child is None:
        raise TypeError(f"{label} has no child {name}; its children are {', '.join(eager._modules) or 'none'}")
    raise TypeError(f"{label}.{name} is a {type(child).__name__}; only a plain nn.Linear is allowed")


def _refuse_leftovers(eager: nn.Module, used: Iterable[str]) -> None:
    """Anything that owns tensors beside the Linears would vanish from the state_dict."""
    label = type(eager).__name__
    own = [n for n, v in (*eager._parameters.items(), *eager._buffers.items()) if v is not None]
    if own:
        raise ValueError(f"{label} owns tensors of its own, which have no place in the fused layer: {', '.join(own)}")
    for name, child in eager._modules.items():
        if child is None or name in used:
            continue
        if next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            kind = type(child).__name__
            raise ValueError(f"{label} has a child with tensors that is not part of the layer: {name} ({kind})")
        wrapped = why_wrapped(f"{label}.{name}", child)
        if wrapped is not None:
            raise ValueError(f"{wrapped}, which replacing the module would drop")


def _chain(eager: nn.Module, first: str, out_features: int, second: str, in_features: int) -> None:
    if out_features != in_features:
        label = type(eager).__name__
        raise ValueError(
            f"{label}: {first} gives {out_features} features, {second} takes {in_features}; they must agree"
        )
