"""What a kernel's name says, in words: cuBLAS, CUTLASS, cuDNN, PyTorch, Inductor, attention, our own."""

from __future__ import annotations

import functools
import re

from .base import FAMILIES, KernelName
from .gemm import decode_gemm
from .inductor import decode_inductor
from .libraries import decode_library, decode_plain
from .ours import decode_ours
from .pytorch import decode_pytorch

__all__ = ["FAMILIES", "KernelName", "decode"]

_DECODERS = (decode_ours, decode_inductor, decode_gemm, decode_pytorch, decode_library, decode_plain)


@functools.lru_cache(maxsize=4096)
def decode(name: str) -> KernelName:
    """Decode the name of a kernel, a copy or a memset as a trace has it. A name that says nothing that we can read has
    the family "unknown"."""
    if name.startswith("Memcpy"):
        where = re.search(r"\((.*)\)", name)
        kind = name.removeprefix("Memcpy").split("(")[0].strip()
        details = {"direction": kind} | ({"memory": where.group(1)} if where else {})
        return KernelName(f"copy {kind}".strip(), "memcpy", "CUDA", details)
    if name.startswith("Memset"):
        return KernelName("memset", "memset", "CUDA")
    for decoder in _DECODERS:
        found = decoder(name)
        if found is not None:
            return found
    return KernelName(name[:100], "unknown", "unknown")
