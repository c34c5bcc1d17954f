"""Builds, checks and publishes the kernel for the Hugging Face Hub: ``python -m fusedmlp hub``.

A tree has one folder a build variant, which ``kernels.get_kernel`` imports under a name of its own. A variant holds the
line of the package (layers down to kernels); command line, patch tables, tuning and reports stay out.
"""

from __future__ import annotations


class HubError(RuntimeError):
    """A request that cannot be met: the message says what was found, what is needed and what to do."""
