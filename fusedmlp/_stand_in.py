"""Reads what a class's forward computes for one instance, by running it on a stand-in for that instance.

``kernelize()`` puts another forward on the instance, so that the class's own is what the module means. It is run with
every child as one symbolic step. Nothing global is patched, unlike in torch.fx's own tracing, since this happens in a
user's first call, where other threads may be at work.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ._eager_form import Step, check_modes, form_of_graph
from ._modes import all_modes, modes

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType)
_FUNCTIONS = (FunctionType, classmethod, staticmethod)
_MISSING = object()


class Absent:
    """In the place of the value of an attribute that a module does not have."""


class Mutable:
    """In the place of the value of an attribute that may change while it stays the same object."""


class OfClass(NamedTuple):
    """A method or property that the forward uses: the class's, which no attribute of the instance hides."""

    function: Any


class UnknownAttributeError(BaseException):
    """The forward of a blank module reads an attribute that was not described."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Recorded(NamedTuple):
    """What a forward computes, the children that it calls, and the attributes of the module that it reads."""

    form: Step
    called: tuple[str, ...]
    reads: tuple[tuple[str, Any], ...]


def blank(
    cls: type[nn.Module],
    children: tuple[tuple[str, type[nn.Module], dict[str, Any]], ...],
    parameters: tuple[str, ...],
    attributes: tuple[tuple[str, Any], ...],
) -> nn.Module:
    """A module that :func:`record_forward` reads like those of the description, made without their constructors.

    ``children``: name, class and attributes of each; ``attributes``: values, :class:`Absent` or :class:`Mutable`.
    """
    made = _bare(cls, dict(attributes))
    made.__dict__["_described"] = {name for name, _ in attributes}
    for name, kind, options in children:
        made._modules[name] = _bare(kind, options)
    for name in parameters:
        made._parameters[name] = nn.Parameter(torch.empty(0))
    return made


def _bare(cls: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.__dict__.update({name: value for name, value in attributes.items() if value is not Absent})
    return made


def record_forward(module: nn.Module) -> Recorded:
    """What ``type(module).forward`` computes from its only argument, in training and in evaluation.

    Raises:
        UnknownAttributeError: a blank module lacks an attribute that the forward reads.
        ValueError: it cannot be read (it needs the values of its input, or an object that may change), does something
            besides what it returns, or computes something else in the other mode.
    """
    training, evaluating = (_record(module, mode) for mode in (True, False))
    if str(training.form) != str(evaluating.form):
        label = type(module).__name__
        raise ValueError(f"{label}.forward computes {training.form} in training and {evaluating.form} in evaluation")
    reads = dict(training.reads) | dict(evaluating.reads)
    return Recorded(training.form, training.called, tuple(reads.items()))


def _record(module: nn.Module, training: bool) -> Recorded:
    label = type(module).__name__
    graph = fx.Graph()
    tracer = _Tracer(graph)
    notes = _Notes(module, tracer, training)
    x = fx.Proxy(graph.placeholder("x"), tracer)
    try:
        with all_modes(training):
            tracer.modes = modes()
            result: Any = type(module).forward(_StandIn(notes), x)  # type: ignore[arg-type]
    except Exception as error:  # whatever a user's forward raises on a symbolic input
        message = f"cannot read what {label}.forward computes: {type(error).__name__}: {error}"
        raise ValueError(message) from error
    if not isinstance(result, fx.Proxy):
        raise ValueError(f"{label}.forward returns a {type(result).__name__}, not one tensor that it computes")
    graph.output(result.node)
    return Recorded(form_of_graph(graph, module), tuple(notes.called), tuple(notes.reads.items()))


class _Tracer(fx.proxy.GraphAppendingTracer):
    modes: tuple[object, ...] | None = None

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if self.modes is not None:
            check_modes(self.modes)
        return super().create_node(*args, **kwargs)


class _Notes:
    """What a stand-in knows and what it saw."""

    def __init__(self, module: nn.Module, tracer: fx.proxy.TracerBase, training: bool) -> None:
        self.module, self.tracer, self.training = module, tracer, training
        self.called: dict[str, None] = {}
        self.reads: dict[str, Any] = {}


class _StandIn:
    """Takes the place of ``self`` in a forward: children and parameters are symbols, constants are noted."""

    __slots__ = ("_notes",)

    def __init__(self, notes: _Notes) -> None:
        object.__setattr__(self, "_notes", notes)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # super() in the forward asks for it
        return type(self._notes.module)

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"it sets self.{name}")

    def __iter__(self) -> Iterator[_Child]:
        if not isinstance(self._notes.module, nn.Sequential):
            raise TypeError("it iterates over itself")
        return iter([_Child(self._notes, name) for name in self._notes.module._modules])

    def __getattr__(self, name: str) -> Any:
        notes = self._notes
        module = notes.module
        if name == "training":
            return notes.training
        if module._modules.get(name) is not None:
            return _Child(notes, name)
        if module._parameters.get(name) is not None:
            return notes.tracer.create_proxy("get_attr", name, (), {})
        described = module.__dict__.get("_described")
        of_class = inspect.getattr_static(type(module), name, _MISSING)
        if isinstance(of_class, property) or (isinstance(of_class, _FUNCTIONS) and name not in module.__dict__):
            if described is not None and not isinstance(of_class, property):
                raise TypeError(f"it calls self.{name}(), which an instance may have in another form")
            notes.reads[name] = OfClass(getattr(type(module), name))
            return of_class.__get__(self, type(module))
        if described is not None and name not in described:
            raise UnknownAttributeError(name)
        value = getattr(module, name, Absent)
        if value is Absent:
            notes.reads[name] = Absent
            raise AttributeError(f"{type(module).__name__} has no attribute {name}")
        if not isinstance(value, CONSTANTS):
            raise TypeError(f"it reads self.{name}, a {type(value).__name__}, which may change")
        notes.reads[name] = value
        return value


class _Child:
    """Takes the place of a child module: calling it is one step."""

    __slots__ = ("_notes", "_name")

    def __init__(self, notes: _Notes, name: str) -> None:
        self._notes, self._name = notes, name

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        self._notes.called[self._name] = None
        return self._notes.tracer.create_proxy("call_module", self._name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"it reads self.{self._name}.{name}")
