"""Host side of each kernel family: allocate, describe, launch. No autograd, no choice of which kernel to use."""

from . import act, common, glu, glu_backward, glu_grads, gluon, linear, small

__all__ = ["act", "common", "glu", "glu_backward", "glu_grads", "gluon", "linear", "small"]
