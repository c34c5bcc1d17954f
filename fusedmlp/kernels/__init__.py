"""Triton kernels, one family a file. Nothing of autograd, allocation or settings in here."""
