"""Is a child a plain ``nn.Linear``, whose weight may be read instead of calling it?

An adapter, a hook, a parametrisation, a quantised or a sharded weight changes what calling the child means.
The fused layers then call the children as eager does; nothing here ever looks around a child.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as _torch_module

# torch changes these dictionaries in place and never rebinds them, so that they may be held.
GLOBAL_HOOKS = (
    _torch_module._global_forward_hooks,
    _torch_module._global_forward_pre_hooks,
    _torch_module._global_backward_hooks,
    _torch_module._global_backward_pre_hooks,
)
_FORWARD, _FORWARD_PRE, _BACKWARD, _BACKWARD_PRE = GLOBAL_HOOKS
_PLAIN_TENSORS = (nn.Parameter, Tensor)
_STAND_INS = (FakeTensor, FunctionalTensor)
_HOOK_KINDS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def has_global_hooks() -> bool:
    """Whether hooks are registered for every module of the process."""
    return bool(_FORWARD or _FORWARD_PRE or _BACKWARD or _BACKWARD_PRE)


def has_hooks(state: dict[str, Any]) -> bool:
    """Whether a module with this ``__dict__`` has hooks of its own."""
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )


def plain_parts(child: object) -> tuple[Tensor, Tensor | None] | None:
    """``(weight, bias)`` of a child whose call is ``F.linear(x, weight, bias)`` and nothing else, else None.

    This runs in every forward: dictionaries only, no ``nn.Module.__getattr__``.
    """
    if type(child) is not nn.Linear:
        return None
    state = child.__dict__
    if has_hooks(state) or "forward" in state:
        return None
    # A wrapper that flattens parameters (FSDP) leaves plain views as attributes where the Parameters were.
    parameters = state["_parameters"]
    weight: Any = parameters["weight"] if "weight" in parameters else state.get("weight")
    bias: Any = parameters["bias"] if "bias" in parameters else state.get("bias")
    if not (type(weight) is nn.Parameter or is_plain_tensor(weight)) or weight.dim() != 2:
        return None
    if not (bias is None or is_plain_tensor(bias)):
        return None
    return weight, bias


def is_plain_tensor(value: object) -> bool:
    """Whether ``value`` is exactly a Parameter or a Tensor: a subclass may mean anything."""
    if type(value) in _PLAIN_TENSORS:
        return True
    # torch.export traces with stand-ins for the plain tensors; elsewhere a stand-in has no data to read.
    return torch.compiler.is_compiling() and type(value) in _STAND_INS


def why_not_plain(name: str, child: object) -> str | None:
    """Why :func:`plain_parts` refuses the child called ``name``, as a phrase; None where it does not."""
    if plain_parts(child) is not None:
        return "hooks are registered for every module" if has_global_hooks() else None
    if type(child) is not nn.Linear:
        return f"{name} is a {type(child).__name__}, not a plain nn.Linear"
    hooked = why_wrapped(name, child)
    if hooked is not None:
        return hooked
    weight = getattr(child, "weight", None)
    if is_plain_tensor(weight) and isinstance(weight, Tensor) and weight.dim() != 2:
        return f"{name}.weight has {weight.dim()} dimensions, not 2"
    for part, value in (("weight", weight), ("bias", getattr(child, "bias", None))):
        if value is None and part == "bias":
            continue
        if not is_plain_tensor(value):
            return f"{name}.{part} is a {type(value).__name__}, not a plain Parameter"
    return f"{name} is not a plain nn.Linear"


def why_wrapped(name: str, module: nn.Module) -> str | None:
    """What was put around a module's forward (a hook, another ``forward``), as a phrase; None if nothing."""
    for attribute, kind in _HOOK_KINDS.items():
        if module.__dict__.get(attribute):
            return f"{name} has {kind}"
    if "forward" in module.__dict__:
        return f"{name} has its forward replaced on the instance"
    return None


def why_any_not_plain(names: tuple[str, ...], children: dict[str, nn.Module | None]) -> str | None:
    """Why the first of these children that is not plain is not; None where all are."""
    for name in names:
        reason = why_not_plain(name, children.get(name))
        if reason is not None:
            return reason
    return None


def first_reason(names: tuple[str, ...], children: dict[str, nn.Module | None]) -> str:
    """Why a layer with these children takes the eager way."""
    return why_any_not_plain(names, children) or "a child is not a plain nn.Linear"
