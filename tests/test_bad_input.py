"""What users get wrong: the exception that eager raises, a message that helps, and nothing half done."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

import fusedmlp
from fusedmlp.activations import activation_names

D, H, OUT = 12, 20, 7

# The constructor with some arguments replaced, and the names of its sizes.
CONSTRUCTORS: dict[str, tuple[Callable[..., nn.Module], dict[str, int]]] = {
    "FusedLinearAct": (fusedmlp.FusedLinearAct, {"in_features": D, "out_features": OUT}),
    "FusedLinearReLU": (fusedmlp.FusedLinearReLU, {"in_features": D, "out_features": OUT}),
    "FusedMLP": (fusedmlp.FusedMLP, {"hidden_size": D, "intermediate_size": H, "out_features": OUT}),
    "FusedGLUMLP": (fusedmlp.FusedGLUMLP, {"hidden_size": D, "intermediate_size": H, "out_features": OUT}),
    "FusedGeGLUMLP": (fusedmlp.FusedGeGLUMLP, {"hidden_size": D, "intermediate_size": H}),
    "FusedSwiGLUMLP": (fusedmlp.FusedSwiGLUMLP, {"hidden_size": D, "intermediate_size": H}),
}
SIZES = [(name, size) for name, (_, sizes) in CONSTRUCTORS.items() for size in sizes]
ACTIVATED = ["FusedLinearAct", "FusedMLP", "FusedGLUMLP"]
BIASED = {"FusedMLP": 2, "FusedGLUMLP": 3, "FusedGeGLUMLP": 3, "FusedSwiGLUMLP": 3}


def made(name: str, **changed: object) -> nn.Module:
    make, sizes = CONSTRUCTORS[name]
    return make(**(sizes | changed))


@pytest.mark.parametrize("name, size", SIZES)
def test_sizes_that_are_not_positive(name: str, size: str) -> None:
    for value in (0, -1):
        for kind in (ValueError, RuntimeError):  # nn.Linear raises RuntimeError for a negative size
            with pytest.raises(kind, match=f"^{size} must be positive, got {value}$"):
                made(name, **{size: value})


@pytest.mark.parametrize("name, size", SIZES)
@pytest.mark.parametrize("value", [4.0, "4", True, [4]], ids=repr)
def test_sizes_that_are_no_ints(name: str, size: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{size} must be an int, got {type(value).__name__}"):
        made(name, **{size: value})


def test_numpy_integers_are_sizes() -> None:
    layer = fusedmlp.FusedMLP(numpy.int64(D), numpy.int32(H))
    assert layer.fc1.weight.shape == (H, D)


def test_widths_of_a_stack() -> None:
    stack = fusedmlp.FusedReLUMLP
    for sizes in ([], [D]):
        with pytest.raises(ValueError, match="at least two widths"):
            stack(sizes)
    with pytest.raises(ValueError, match=r"^sizes\[1\] must be positive, got 0$"):
        stack([D, 0, OUT])
    with pytest.raises(TypeError, match=r"^sizes\[2\] must be an int, got float"):
        stack([D, H, 7.0])
    for sizes in (D, "12", None):
        with pytest.raises(TypeError, match="sizes must be a sequence of ints"):
            stack(sizes)
    with pytest.raises(ValueError, match=r"2 of them \(layer 0, layer 1\), got 3"):
        stack([D, H, OUT], bias=[True, True, False])


@pytest.mark.parametrize("name", ACTIVATED)
def test_unknown_activations(name: str) -> None:
    with pytest.raises(ValueError, match="'mish'") as caught:
        made(name, activation="mish")
    assert all(known in str(caught.value) for known in activation_names())
    for value in (None, 3, torch.relu):
        with pytest.raises(TypeError, match="activation must be a name"):
            made(name, activation=value)


def test_forms_of_gelu() -> None:
    with pytest.raises(ValueError, match="approximate must be one of 'tanh', 'none', got 'erf'"):
        fusedmlp.FusedGeGLUMLP(D, H, approximate="erf")
    with pytest.raises(TypeError, match="approximate must be a str, got bool"):
        fusedmlp.FusedGeGLUMLP(D, H, approximate=True)


@pytest.mark.parametrize("name", list(BIASED))
def test_biases(name: str) -> None:
    count = BIASED[name]
    with pytest.raises(ValueError, match=f"bias must be a bool or {count} of them"):
        made(name, bias=(True,) * (count + 1))
    for value in ("none", 0.5, (True,) * (count - 1) + ("no",)):
        with pytest.raises(TypeError, match="bias must be a bool"):
            made(name, bias=value)


@pytest.mark.parametrize("name", list(CONSTRUCTORS))
def test_dtypes_that_eager_refuses(name: str) -> None:
    with pytest.raises(RuntimeError):
        nn.Linear(D, OUT, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        made(name, dtype=torch.int64)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: made(name) for name in CONSTRUCTORS},
    "FusedReLUMLP": lambda: fusedmlp.FusedReLUMLP([D, H, OUT]),
}
each_layer = pytest.mark.parametrize("name", list(LAYERS))


def eager_error(layer: nn.Module, state: dict[str, Tensor]) -> type[Exception]:
    """What loading the same tensors into eager twins of the same names and shapes raises."""
    twin = nn.Module()
    for key, value in layer.state_dict().items():
        owner = twin
        *path, leaf = key.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(torch.empty_like(value)))
    with pytest.raises(Exception) as caught:
        twin.load_state_dict(state)
    return caught.type


def spoiled(layer: nn.Module, how: str) -> tuple[dict[str, Tensor], str]:
    """Other values for every tensor, one of them spoiled, and its name."""
    state = {key: torch.full_like(value, 9.0) for key, value in layer.state_dict().items()}
    key = list(state)[-1]
    if how == "missing":
        del state[key]
    elif how == "surplus":
        key = "router.weight"
        state[key] = torch.ones(2)
    else:
        state[key] = torch.full((3, *state[key].shape), 9.0)
    return state, key


@each_layer
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("how", ["missing", "surplus", "misshapen"])
def test_state_dicts_that_do_not_fit(name: str, how: str, assign: bool) -> None:
    layer = LAYERS[name]()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state, key = spoiled(layer, how)
    with pytest.raises(eager_error(layer, state)) as caught:
        layer.load_state_dict(state, assign=assign)
    assert type(caught.value) is RuntimeError
    assert key in str(caught.value) and type(layer).__name__ in str(caught.value)
    assert all(f"{k} {list(v.shape)}" in str(caught.value) for k, v in before.items()), "it says what is allowed"
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items()), "nothing was loaded"


@each_layer
def test_loading_without_strict_is_as_in_eager(name: str) -> None:
    layer = LAYERS[name]()
    state, key = spoiled(layer, "missing")
    result = layer.load_state_dict(state, strict=False)
    assert result.missing_keys == [key] and result.unexpected_keys == []
    assert all((layer.state_dict()[k] == 9).all() for k in state)
    layer = LAYERS[name]()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(spoiled(layer, "misshapen")[0], strict=False)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    with pytest.raises(TypeError):
        layer.load_state_dict([1, 2])


@each_layer
def test_loading_respects_hooks_that_rename(name: str) -> None:
    layer = LAYERS[name]()
    state = {f"old.{k}": torch.full_like(v, 9.0) for k, v in layer.state_dict().items()}

    def rename(module: nn.Module, given: dict[str, Tensor], prefix: str, *rest: object) -> None:
        for key in [k for k in given if k.startswith("old.")]:
            given[key.removeprefix("old.")] = given.pop(key)

    layer.register_load_state_dict_pre_hook(rename)
    layer.load_state_dict(state)
    assert all((v == 9).all() for v in layer.state_dict().values())


@each_layer
@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, D + 1),
        torch.ones(3, D, dtype=torch.int64),
        torch.ones(3, D, dtype=torch.complex64),
        torch.ones(3, D, dtype=torch.float64),
        torch.ones(3, D, dtype=torch.bfloat16),
        torch.ones(3, D, device="meta"),
    ],
    ids=["width", "integer", "complex", "float64", "bfloat16", "device"],
)
def test_inputs_that_do_not_fit(name: str, x: Tensor) -> None:
    layer = LAYERS[name]()
    with pytest.raises(RuntimeError) as caught:
        layer(x)
    said = str(caught.value)
    given = str(x.shape[-1]) if x.shape[-1] != D else str(x.device) if x.is_meta else str(x.dtype)
    assert given in said, said
