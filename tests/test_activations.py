"""The table of activations: every name its own function, others refused, modules recognised by class."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.operations import ACTIVATIONS as PLAIN
from torch import nn

import fusedmlp
from fusedmlp.activations import ACTIVATIONS, Activation, activation_of_module, resolve_activation

# What each Hugging Face name means, written out here so that an error in the table cannot hide in it.
HF_NAMES = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
    "sigmoid": "sigmoid",
    "linear": "identity",
}
GRID = torch.linspace(-12, 12, 4097, dtype=torch.float64)  # holds 0, where kinks are


def slope(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def test_the_table_has_the_eight():
    assert set(ACTIVATIONS) == set(PLAIN) and all(name == a.name for name, a in ACTIVATIONS.items())


@pytest.mark.parametrize("name", list(PLAIN))
def test_value_and_slope(name):
    function = ACTIVATIONS[name].fn
    torch.testing.assert_close(function(GRID), PLAIN[name](GRID), rtol=0, atol=1e-14)
    torch.testing.assert_close(slope(function, GRID), slope(PLAIN[name], GRID), rtol=0, atol=1e-14)


@pytest.mark.parametrize("first", list(PLAIN))
def test_no_two_are_the_same_function(first):
    for second in set(PLAIN) - {first}:
        gap = (ACTIVATIONS[first].fn(GRID) - ACTIVATIONS[second].fn(GRID)).abs().max()
        assert gap > 4e-4, f"{first} and {second} differ by {gap:.1e} only"


@pytest.mark.parametrize("hf_name, ours", HF_NAMES.items())
def test_hugging_face_names(hf_name, ours):
    """Each name means ours, and ours is what transformers computes under that name."""
    from transformers import activations

    assert resolve_activation(hf_name) is ACTIVATIONS[ours]
    theirs = activations.ACT2FN[hf_name]
    # gelu_fast and gelu_new round their constants to eight digits.
    torch.testing.assert_close(ACTIVATIONS[ours].fn(GRID), theirs(GRID), rtol=0, atol=1e-7)
    torch.testing.assert_close(slope(ACTIVATIONS[ours].fn, GRID), slope(theirs, GRID), rtol=0, atol=1e-7)


def test_every_name_of_transformers_is_right_or_refused():
    """No name of ACT2FN resolves to another function than its own."""
    from transformers import activations

    accepted = 0
    for name in activations.ACT2FN:
        try:
            found = resolve_activation(name)
        except ValueError:
            continue
        accepted += 1
        theirs = activations.ACT2FN[name]
        torch.testing.assert_close(found.fn(GRID), theirs(GRID), rtol=0, atol=1e-6, msg=name)
    assert accepted >= 12


def test_every_listed_name_resolves_to_its_entry():
    for activation in ACTIVATIONS.values():
        for name in (activation.name, *activation.hf_names):
            assert resolve_activation(name) is activation
        assert resolve_activation(activation) is activation


@pytest.mark.parametrize("name", ["tanh", "mish", "GELU", "gelu_10", "laplace", "", "leaky_relu", "relu6"])
def test_other_names_are_refused_with_the_list(name):
    with pytest.raises(ValueError, match="unknown activation") as refused:
        resolve_activation(name)
    assert repr(name) in str(refused.value)
    assert all(known in str(refused.value) for known in (*ACTIVATIONS, "gelu_new", "swish"))


@pytest.mark.parametrize("thing", [None, 3, nn.ReLU, F.relu])
def test_things_that_are_no_names(thing):
    with pytest.raises((TypeError, ValueError)):
        resolve_activation(thing)


@pytest.mark.parametrize("name", list(PLAIN))
def test_what_is_saved_suffices(name):
    """ "output" is claimed only where the slope follows from the output: equal outputs, equal slopes."""
    activation = ACTIVATIONS[name]
    assert activation.saves in ("output", "input")
    from_output = {
        "relu": lambda y: (y > 0).double(),
        "sigmoid": lambda y: y * (1 - y),
        "identity": torch.ones_like,
    }
    if activation.saves == "output":
        torch.testing.assert_close(from_output[name](activation.fn(GRID)), slope(activation.fn, GRID))
    else:
        assert name not in ("relu", "identity"), "would keep more than it needs"


def named(value):
    """A test's name without addresses, which differ between the processes of a test run."""
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(
    "module, name",
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Identity(), "identity"),
        (F.relu, "relu"),
        (F.gelu, "gelu"),
        (F.silu, "silu"),
        (torch.sigmoid, "sigmoid"),
    ],
    ids=named,
)
def test_modules_and_functions_are_recognised(module, name):
    assert activation_of_module(module) is ACTIVATIONS[name]


class Doubled(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "module",
    [Doubled(), nn.Tanh(), nn.LeakyReLU(), nn.ReLU6(), torch.tanh, None, "relu6", nn.Linear(2, 2), []],
    ids=named,
)
def test_others_are_not_taken_for_known_ones(module):
    assert activation_of_module(module) is None


def test_modules_of_transformers_are_recognised_for_what_they_compute():
    from transformers import activations

    recognised = 0
    for name in activations.ACT2FN:
        theirs = activations.ACT2FN[name]
        found = activation_of_module(theirs)
        if found is None:
            continue
        recognised += 1
        torch.testing.assert_close(found.fn(GRID), theirs(GRID), rtol=0, atol=1e-6, msg=name)
    assert recognised >= 9


@pytest.mark.parametrize("name", list(PLAIN))
def test_copies_stay_the_entry(name):
    """Modules hold activations: a deepcopy or a pickle of one must still be recognised as the same."""
    activation = ACTIVATIONS[name]
    assert copy.deepcopy(activation) is activation
    assert pickle.loads(pickle.dumps(activation)) is activation
    with pytest.raises(AttributeError):
        activation.name = "other"
    assert isinstance(activation, Activation)


def test_public_names():
    assert fusedmlp.ACTIVATIONS is ACTIVATIONS and fusedmlp.resolve_activation is resolve_activation


def test_constants_stand_right_of_the_tensors_that_they_meet():
    """The interpreter of Triton 3.9 makes a constexpr of a constexpr times a tensor, which `tl.where` then refuses."""
    constants: set[str] = set()
    bad = []
    for path in (Path(fusedmlp.__file__).parent / "kernels").rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants |= {
            ast.unparse(node.targets[0])
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("tl.constexpr", "gl.constexpr"))
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp):
                left, right = (
                    {n.id for n in ast.walk(side) if isinstance(n, ast.Name)} for side in (node.left, node.right)
                )
                if left and left <= constants and right - constants:
                    bad.append(f"{path.name}: {ast.unparse(node)}")
    assert len(constants) > 5 and not bad, bad
