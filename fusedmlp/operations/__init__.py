"""Each operation as a sequence of launches and cuBLAS products. No autograd in here.

Every module has the same functions, over ``weights`` and ``biases`` in layer order (gate, up, down for the gated
MLP; a bias may be None):

* ``names(layers)``: of the weights and of the biases, as users know them;
* ``check(x, weights, biases)``: the shapes fit, or the exception that eager raises;
* ``reference(x, weights, biases, activation)``: the plain PyTorch meaning;
* ``reference_grads(gy, x, weights, biases, activation)``: its backward written out, over matrices;
* ``keeps(needs)``: the level of :mod:`fusedmlp.saving` that backward has a use for, given the gradients asked for;
* ``forward(plan, x, weights, biases, save)``: ``(y [M, N], tensors for backward)`` of such a level;
* ``spends(activation)``: whether backward can write its own results over the first of those tensors;
* ``backward(plan, gy, x, weights, biases, saved, needs, spent=False)``: gradients of x (as [M, K]), weights and biases,
  flat, None where ``needs`` says so. What ``saved`` lacks is made again. ``spent``: nobody reads the first tensor saved
  again.
"""

from __future__ import annotations

from types import ModuleType

from . import glu_mlp, linear_act, mlp, relu_mlp

OPERATIONS: dict[str, ModuleType] = {
    "linear_act": linear_act,
    "glu_mlp": glu_mlp,
    "mlp": mlp,
    "relu_mlp": relu_mlp,
}
