"""The namespace of this copy's operators.

A Hub build puts a file of the same two names in this one's place, with a namespace of its own: several builds and the
installed package then live in one process without taking each other's operators.
"""

from __future__ import annotations

import torch

ops = torch.ops.fusedmlp


def add_op_namespace_prefix(op_name: str) -> str:
    """``"glu_mlp"`` -> the operator's full name."""
    return f"fusedmlp::{op_name}"
