"""Host side of each kernel family: allocate, describe, launch. No autograd, no choice of which kernel to use."""
