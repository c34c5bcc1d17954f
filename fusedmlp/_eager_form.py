"""Reads what an eager module's forward computes, so that only an exact equal is put in its place.

The forward is traced symbolically (torch.fx) with every child as one step, and the result is compared with
a form such as ``down_proj(act(gate_proj(x)) * up_proj(x))``. A constant factor, a clamp, a norm, a cast, a
second output or a dropout that can be active shows up as another form, whatever the class is called.
"""

from __future__ import annotations

import operator
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ._children import why_wrapped
from ._modes import all_modes, modes
from .activations import ACTIVATIONS, Activation, activation_of_module, resolve_activation

_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_METHOD_ACTIVATIONS = {"relu": "relu", "relu_": "relu", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Step:
    """One step of a forward: ``target`` applied to ``args``. ``op`` is that of torch.fx, or ``mul``."""

    op: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.op == "input":
            return str(self.target)
        if self.op == "mul":
            return " * ".join(map(str, self.args))
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "?")
        words = [str(a) for a in self.args] + [f"{k}={v}" for k, v in self.kwargs.items()]
        return str(name) if self.op == "get_attr" else f"{name}({', '.join(words)})"


class _ChildTracer(fx.Tracer):
    """Every submodule is one step: what happens inside a child is the child's business."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        check_modes(self.modes)
        return super().create_node(*args, **kwargs)


def check_modes(before: tuple[object, ...]) -> None:
    """Raises ValueError where the modes are not those any more: the forward that is traced switched one."""
    if modes() != before:
        raise ValueError("it switches gradients or autocast")


def traced_form(module: nn.Module) -> Step:
    """The expression that ``module.forward`` computes from its only argument, in training and in eval mode.

    Raises:
        ValueError: something is put around the forward or the state_dict; or the forward cannot be traced,
            does something besides what it returns, or computes something else in the other mode.
    """
    label = type(module).__name__
    around = why_wrapped(label, module) or _why_special(label, module)
    if around is not None:
        raise ValueError(f"{around}, which replacing the module would drop")
    training, evaluating = (_traced(module, label, mode) for mode in (True, False))
    if str(training) != str(evaluating):
        raise ValueError(f"{label}.forward computes {training} in training and {evaluating} in evaluation")
    return training


def _why_special(label: str, module: nn.Module) -> str | None:
    for attribute in _STATE_HOOKS:
        if module.__dict__.get(attribute):
            return f"{label} has a hook in {attribute}"
    for method in ("__call__", "_save_to_state_dict", "_load_from_state_dict"):
        if getattr(type(module), method) is not getattr(nn.Module, method):
            return f"{label} has a {method} of its own"
    return None


# torch.fx replaces nn.Module.__call__ while it traces: of two threads one would find the other's, or lose its own.
_tracing = threading.RLock()


def _traced(module: nn.Module, label: str, training: bool) -> Step:
    with _tracing:
        before = module.training
        module.training = training
        try:
            with all_modes(training):
                graph = _ChildTracer().trace(module)
        except Exception as error:  # whatever a user's forward raises on a symbolic input
            message = f"cannot read what {label}.forward computes: {type(error).__name__}: {error}"
            raise ValueError(message) from error
        finally:
            module.training = before
    inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        given = ", ".join(inputs) or "nothing"
        raise ValueError(f"{label}.forward takes {given}; only one argument is allowed")
    return form_of_graph(graph, module)


def form_of_graph(graph: fx.Graph, module: nn.Module) -> Step:
    """The expression that a traced forward of one argument returns.

    Raises:
        ValueError: it returns nothing, or does something besides.
    """
    label = type(module).__name__
    steps: dict[fx.Node, Step] = {}
    for node in graph.nodes:
        if node.op == "output":
            return _as_step(_mapped(node.args[0], steps))
        steps[node] = _step(node, steps, module)
        if not node.users:  # it may change something in place
            raise ValueError(f"{label}.forward also computes {steps[node]}, whose result it does not use")
    raise ValueError(f"{label}.forward returns nothing")


def _mapped(value: Any, steps: dict[fx.Node, Step]) -> Any:
    """``value`` with every node in it replaced by its step."""
    lookup: Any = steps.__getitem__
    return fx.node.map_arg(value, lookup)


def _as_step(value: object) -> Step:
    return value if isinstance(value, Step) else Step("call_function", "return", (value,))


def _step(node: fx.Node, steps: dict[fx.Node, Step], module: nn.Module) -> Step:
    args = _mapped(node.args, steps)
    kwargs = dict(_mapped(node.kwargs, steps))
    if node.op == "placeholder":
        return Step("input", "x")
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        passes = type(child) is nn.Identity or (type(child) in _DROPOUT_MODULES and child.p == 0)
        if passes and len(args) == 1 and why_wrapped(str(node.target), child) is None:
            return args[0]
    if node.target is F.dropout and args:
        kwargs.pop("training", None)  # a dropout that can be on counts as on
        if kwargs.get("p", args[1] if len(args) > 1 else 0.5) == 0:
            return args[0]
    if node.target in (operator.mul, torch.mul) and len(args) == 2 and not kwargs:
        return Step("mul", "*", args)
    return Step(node.op, node.target, args, kwargs)


def is_child_call(step: object, name: str | None = None) -> bool:
    """Whether ``step`` calls one child (that of that name) on one positional argument."""
    if not isinstance(step, Step) or step.op != "call_module" or len(step.args) != 1 or step.kwargs:
        return False
    return name is None or step.target == name


def is_input(step: object) -> bool:
    """Whether ``step`` is the module's first argument itself."""
    return isinstance(step, Step) and step.op == "input" and step.target == "x"


def split_activation(
    step: object, module: nn.Module, stated: str | Activation | None
) -> tuple[Activation, Step] | None:
    """``(activation, what it is applied to)`` of a step that applies one, or that calls a bare Linear.

    ``stated`` is the caller's word for an activation that is not recognised; for one that is, they must
    agree.

    Raises:
        ValueError: the activation is unknown and none was stated, or the stated one contradicts the module.
    """
    if not isinstance(step, Step) or not step.args or not isinstance(step.args[0], Step):
        return None
    told = None if stated is None else resolve_activation(stated)
    label = type(module).__name__
    if is_child_call(step):
        child = module.get_submodule(step.target)
        if isinstance(child, nn.Linear):
            return (_agreed(ACTIVATIONS["identity"], told, label), step)
        wrapped = why_wrapped(f"{label}.{step.target}", child)
        if wrapped is not None:
            raise ValueError(f"{wrapped}, which replacing the module would drop")
        found, what = activation_of_module(child), f"{step.target} = {child}"
    else:
        applied = applied_function(step)
        if applied is None:
            return None
        found, what = applied[0], str(step)
    if found is None and told is None:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ValueError(f"{label} applies an activation that is not known: {what}; the known ones are: {known}")
    if found is not None:
        told = _agreed(found, told, label)
    return None if told is None else (told, step.args[0])


def applied_function(step: Step) -> tuple[Activation | None] | None:
    """The activation (None: one that is not known) of a step that applies a function or a method to one argument and
    no child; None for another step."""
    if step.op == "call_function" and len(step.args) == 1:
        kwargs = {k: v for k, v in step.kwargs.items() if k != "inplace"}
        if step.target is F.gelu and set(kwargs) == {"approximate"}:
            return ({"none": ACTIVATIONS["gelu"], "tanh": ACTIVATIONS["gelu_tanh"]}.get(kwargs["approximate"]),)
        return (None if kwargs else activation_of_module(step.target),)
    if step.op == "call_method" and len(step.args) == 1 and not step.kwargs:
        name = _METHOD_ACTIVATIONS.get(str(step.target))
        return None if name is None else (ACTIVATIONS[name],)
    return None


def _agreed(found: Activation, told: Activation | None, label: str) -> Activation:
    if told is not None and told.name != found.name:
        raise ValueError(f"{label} applies {found.name}, but activation={told.name!r} was given")
    return found
