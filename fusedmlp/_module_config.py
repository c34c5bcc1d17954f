"""Constructor arguments of the modules: sizes, biases, and what a Hugging Face config says about them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from .activations import Activation, resolve_activation

# Fields that change what an MLP computes, with the values that leave it as it is.
_CHANGES_THE_MLP: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (None, 0, 1),
    "mlp_multipliers": (None, [1.0, 1.0], (1.0, 1.0)),
    "activation_sparsity_pattern": (None, 0.0),
    "swiglu_limit": (None,),
}
_ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function")


class InvalidSizeError(ValueError, RuntimeError):
    """A size that is not positive; a RuntimeError too, as ``nn.Linear`` raises for a negative one."""


def positive_size(name: str, value: object) -> int:
    """``value`` as a positive int.

    Raises:
        TypeError: not an integer.
        InvalidSizeError: zero or negative.
    """
    try:
        size = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if size <= 0:
        raise InvalidSizeError(f"{name} must be positive, got {size}")
    return size


def bias_flags(bias: object, names: Sequence[str]) -> tuple[bool, ...]:
    """One flag per projection in ``names``, from one flag for all or a tuple/list of them."""
    if isinstance(bias, (tuple, list)):
        if len(bias) != len(names):
            want = ", ".join(names)
            raise ValueError(f"bias must be a bool or {len(names)} of them ({want}), got {len(bias)}: {bias!r}")
        return tuple(_flag(b) for b in bias)
    return (_flag(bias),) * len(names)


def _flag(value: object) -> bool:
    if value is None or isinstance(value, (bool, int)):
        return bool(value)
    raise TypeError(f"bias must be a bool, or a tuple of bools, got {type(value).__name__}: {value!r}")


def accepted(cls: type, activation: str | Activation, allowed: tuple[str, ...] | None) -> str:
    """The activation's own name; ValueError where ``cls`` allows only others."""
    name = resolve_activation(activation).name
    if allowed is not None and name not in allowed:
        raise ValueError(f"{cls.__name__} computes {' or '.join(allowed)}, got activation {name!r}")
    return name


def config_sizes(config: object) -> tuple[int, int]:
    """``(hidden_size, intermediate_size)`` of a Hugging Face config.

    Raises:
        TypeError: the config lacks one of them, or one is no int (a list of one width per layer, for
            instance).
        ValueError: the config has a field that changes what its MLP computes, such as a sparsity or a
            multiplier.
    """
    for field in ("hidden_size", "intermediate_size"):
        if getattr(config, field, None) is None:
            hint = "; pass its text_config" if getattr(config, "text_config", None) is not None else ""
            raise TypeError(f"{type(config).__name__} has no {field}, which from_config() needs{hint}")
    for field, harmless in _CHANGES_THE_MLP.items():
        value = getattr(config, field, None)
        if not any(value == h for h in harmless) and not _all_zero(value):
            name = type(config).__name__
            raise ValueError(f"{name}.{field} is {value!r}, which changes what its MLP computes: not supported")
    sizes = config.hidden_size, config.intermediate_size  # type: ignore[attr-defined]
    return positive_size("config.hidden_size", sizes[0]), positive_size("config.intermediate_size", sizes[1])


def _all_zero(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(v == 0 for v in value)


def config_activation(config: object) -> Activation:
    """The activation that a Hugging Face config names.

    Raises:
        TypeError: no field names one.
        ValueError: it is not a known one, or two fields disagree.
    """
    given = {f: getattr(config, f) for f in _ACTIVATION_FIELDS if getattr(config, f, None) is not None}
    if not given:
        raise TypeError(f"{type(config).__name__} has none of the fields {', '.join(_ACTIVATION_FIELDS)}")
    found = {f: resolve_activation(name) for f, name in given.items()}
    if len({a.name for a in found.values()}) > 1:
        said = ", ".join(f"{f}={name!r}" for f, name in given.items())
        raise ValueError(f"{type(config).__name__} names two activations: {said}; leave one")
    return next(iter(found.values()))


def config_bias(config: object, default: bool, given: object = None) -> object:
    """``given`` where it is not None, else the config's ``mlp_bias``, else ``default``."""
    if given is not None:
        return given
    said = getattr(config, "mlp_bias", None)
    return default if said is None else bool(said)
