"""Names of our own kernels: the layer and the launch of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from .base import KernelName

GLU, ACT, MLP, STACK = "FusedGLUMLP", "FusedLinearAct", "FusedMLP", "FusedReLUMLP"

# Function name -> (layers that launch it, what one launch computes, the operations of PyTorch that it replaces).
KERNELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "linear_act_tma": (f"{ACT}, {MLP}", "linear, bias and activation", ("mm", "add", "activation")),
    "linear_act_pointer": (f"{ACT}, {MLP}", "linear, bias and activation", ("mm", "add", "activation")),
    "glu_tma": (GLU, "gate, up, activation and product", ("mm", "mm", "activation", "mul")),
    "glu_pointer": (GLU, "gate, up, activation and product", ("mm", "mm", "activation", "mul")),
    "hidden_forward_gluon": (f"{GLU}, {MLP}", "hidden layer: products, bias, activation", ("mm", "activation", "mul")),
    "glu_small": (GLU, "gate, up, activation, product and down, for few tokens", ("mm", "mm", "activation", "mul")),
    "linear_small": (
        f"{GLU}, {MLP}, {ACT}, {STACK}",
        "linear, bias and activation, for few tokens",
        ("mm", "activation"),
    ),
    "relu_stack": (STACK, "all layers of a ReLU stack", ("mm", "add", "relu")),
    "glu_backward_tma": (GLU, "dH, dGate, dUp, activation again, bias gradients", ("mm", "mul", "activation_backward")),
    "glu_backward_pointer": (
        *(GLU, "dH, dGate, dUp, activation again, bias gradients"),
        ("mm", "mul", "activation_backward"),
    ),
    "hidden_backward_small": (
        *(f"{GLU}, {MLP}, {STACK}", "gradient of the hidden layer, activation's and bias gradients, for few tokens"),
        ("mm", "activation_backward", "sum"),
    ),
    "dual_dgrad_small": (f"{GLU}, {MLP}", "dX (over gate and up), for few tokens", ("mm", "mm", "add")),
    "hidden_backward_gluon": (
        *(f"{GLU}, {MLP}", "gradient of the hidden layer, activation's gradient, bias gradients"),
        ("mm", "activation_backward", "sum"),
    ),
    "glu_grads_gluon": (
        *(f"{GLU}, {MLP}", "dX and weight gradients, several products in one launch"),
        ("mm", "mm", "mm", "add"),
    ),
    "dual_dgrad_tma": (GLU, "dX over gate and up", ("mm", "mm", "add")),
    "dual_dgrad_pointer": (GLU, "dX over gate and up", ("mm", "mm", "add")),
    "act_backward_tma": (f"{MLP}, {STACK}", "dX, activation's gradient, bias gradient", ("mm", "activation_backward")),
    "act_backward_pointer": (
        *(f"{MLP}, {STACK}", "dX, activation's gradient, bias gradient"),
        ("mm", "activation_backward"),
    ),
    "act_forward": (f"{ACT}, {MLP}", "bias and activation beside cuBLAS", ("add", "activation")),
    "act_grad": (f"{ACT}, {MLP}, {STACK}", "activation's gradient and bias gradient", ("activation_backward", "sum")),
    "glu_act_forward": (GLU, "activation and product beside cuBLAS", ("activation", "mul")),
    "glu_act_backward": (GLU, "dGate, dUp and bias gradients beside cuBLAS", ("activation_backward", "mul", "sum")),
}

GEMMS = {name for name, (_, _, operations) in KERNELS.items() if "mm" in operations}


def decode_ours(name: str) -> KernelName | None:
    """A kernel of this package, else None."""
    if name not in KERNELS:
        return None
    layer, text, operations = KERNELS[name]
    language = "Gluon" if name.endswith("_gluon") else "Triton"
    form = "TMA descriptors" if name.endswith("_tma") else "pointers" if name.endswith("_pointer") else ""
    details = {"layer": layer, "language": language, "kernel": name} | ({"operands": form} if form else {})
    family = "gemm" if name in GEMMS else "elementwise"
    return KernelName(f"{layer}: {text}", family, "fusedmlp", details, operations)


_BY_WEIGHTS = {1: ACT, 2: MLP, 3: GLU}  # weights of a call -> its layer, but for a stack


def in_context(
    name: KernelName, shapes: Sequence[Sequence[int]], grid: Sequence[int], block: Sequence[int]
) -> KernelName:
    """Our kernel with what its launch tells beside the name: the layer, by the weights among the operands of its
    autograd function (``shapes``, where the profile recorded them), and how the plan launches it."""
    details, text = dict(name.details), name.text
    weights = sum(len(s) == 2 for s in shapes[1:])
    layer = _BY_WEIGHTS.get(weights, "")
    if layer and layer in details["layer"]:
        text = text.replace(details["layer"], layer, 1)
        details["layer"] = layer
    if grid and block:
        details["plan"] = f"{prod(grid)} blocks of {prod(block)} threads"
        text = f"{text}, {details['plan']}"
    return replace(name, text=text, details=details)
