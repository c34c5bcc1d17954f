"""The tables of patch() against the Hugging Face library that is installed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import transformers
from torch import nn

import fusedmlp
from fusedmlp.integrations import _tables
from fusedmlp.integrations._dense_act import FusedDenseAct

D = 8


def hugging_face_classes() -> dict[str, list[str]]:
    """Class name -> the modules of the installed library that define it."""
    found: dict[str, list[str]] = {}
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"transformers.models.{path.parent.name}.{path.stem}")
    return found


CLASSES = hugging_face_classes()
TABLED = {
    **dict.fromkeys(_tables.GATED, (fusedmlp.FusedGLUMLP, ("gate_proj", "up_proj", "down_proj"))),
    **dict.fromkeys(_tables.TWO_LAYER, (fusedmlp.FusedMLP, ("fc1", "fc2"))),
    **dict.fromkeys(_tables.DENSE_ACT, (FusedDenseAct, ("dense",))),
}


# Found in every release that the package works with.
CORE = {
    "BertIntermediate",
    "CLIPMLP",
    "GemmaMLP",
    "LlamaMLP",
    "MistralMLP",
    "PhiMLP",
    "Qwen3MLP",
    "SiglipMLP",
}
SAME_RELEASE = transformers.__version__.startswith(_tables.READ_IN + ".")


def test_the_tables_name_real_classes_once() -> None:
    tables = [
        _tables.GATED,
        _tables.TWO_LAYER,
        _tables.DENSE_ACT,
        _tables.DENSE_ACT_BEFORE_5,
        frozenset(_tables.LEFT),
    ]
    every = [name for table in tables for name in table]
    assert len(every) == len(set(every))
    wanted = set(TABLED) | set(_tables.LEFT) if SAME_RELEASE else CORE
    assert not wanted - set(CLASSES), f"transformers {transformers.__version__} lacks {sorted(wanted - set(CLASSES))}"


def instance(cls: type[nn.Module], linears: tuple[str, ...]) -> nn.Module:
    """One with every Linear, activation and dropout (off) that its forward may ask for."""
    mlp = cls.__new__(cls)
    nn.Module.__init__(mlp)
    for child in re.findall(r"self\.(\w+)", inspect.getsource(cls.forward)):
        if child in linears:
            setattr(mlp, child, nn.Linear(D, D))
        elif child in ("drop", "dropout", "dropout1", "dropout2"):
            setattr(mlp, child, nn.Dropout(0.0))
        elif child in ("residual_dropout", "activation_sparsity"):
            setattr(mlp, child, 0.0)
        elif "act" in child:
            setattr(mlp, child, nn.ReLU())
    return mlp


@pytest.mark.parametrize("name", sorted(set(TABLED) & set(CLASSES)))
def test_the_forward_of_a_tabled_class_is_the_fused_one(name: str) -> None:
    fused, linears = TABLED[name]
    for module in CLASSES[name]:
        mlp = instance(getattr(importlib.import_module(module), name), linears)
        try:
            made = fused.from_module(mlp)
        except (TypeError, ValueError, AttributeError):
            # Another release may compute something else, which then is refused rather than replaced.
            if SAME_RELEASE or name in CORE:
                raise
            continue
        assert made.activation == ("gelu" if name == "PatchTSMixerMLP" else "relu")
