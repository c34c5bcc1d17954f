"""What a decoded kernel name says, and the dtype spellings of every library."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FAMILIES = (
    *("gemm", "convolution", "attention", "elementwise", "copy", "fill", "reduction", "softmax", "norm"),
    *(
        "optimizer",
        "index",
        "random",
        "sort",
        "pool",
        "loss",
        "collective",
        "fused",
        "memcpy",
        "memset",
        "other",
        "unknown",
    ),
)


@dataclass(frozen=True)
class KernelName:
    """A decoded name.

    text: what the kernel does, one line. family: one of FAMILIES. library: who wrote it. details: what else the name
    holds (tile, stages, cluster, layout, dtypes, epilogue, ...). operations: the operations in it by their PyTorch
    names, where the name tells: ``("gelu", "mul")``.
    """

    text: str
    family: str
    library: str
    details: dict[str, str] = field(default_factory=dict)
    operations: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        return self.family != "unknown"


# Longest spelling first, so that "float" does not win inside "bfloat16".
_DTYPES = (
    ("__nv_bfloat16", "bfloat16"),
    ("cutlass::bfloat16_t", "bfloat16"),
    ("c10::BFloat16", "bfloat16"),
    ("c10::Half", "float16"),
    ("cutlass::half_t", "float16"),
    ("__half", "float16"),
    ("c10::Float8_e4m3fn", "float8_e4m3"),
    ("c10::Float8_e5m2", "float8_e5m2"),
    ("c10::complex<float>", "complex64"),
    ("bfloat16", "bfloat16"),
    ("bf16", "bfloat16"),
    ("tf32", "tf32"),
    ("fp16", "float16"),
    ("f16", "float16"),
    ("float", "float32"),
    ("f32", "float32"),
    ("double", "float64"),
    ("f64", "float64"),
    ("long", "int64"),
    ("bool", "bool"),
    ("unsigned char", "uint8"),
    ("signed char", "int8"),
    ("short", "int16"),
    ("int", "int32"),
)
_CPP_DTYPE = re.compile(
    "|".join(
        rf"(?<![\w:])(?<!unsigned ){re.escape(spelt)}(?!\w)"
        for spelt, _ in _DTYPES
        if not re.fullmatch(r"[a-z]*f\d+", spelt)
    )
)
_MEANING = dict(_DTYPES)


def dtypes_in(text: str) -> list[str]:
    """PyTorch names of the C++ element types in a piece of a signature, in order, each once; int alone counts sizes
    and offsets almost everywhere, so it is left out beside others."""
    found = list(dict.fromkeys(_MEANING[m.group()] for m in _CPP_DTYPE.finditer(text)))
    return [name for name in found if name != "int32"] or found


def dtype(spelt: str) -> str:
    """The PyTorch name of a library's spelling; the spelling itself where it is unknown."""
    return _MEANING.get(spelt, spelt)


def words(identifier: str) -> str:
    """``nll_loss_forward_kernel``, ``RowwiseMomentsCUDAKernel`` -> ``nll loss forward``, ``rowwise moments``."""
    spaced = re.sub(r"([a-z0-9])([A-Z])|([A-Z]+)([A-Z][a-z])", r"\1\3 \2\4", identifier.replace("_", " "))
    kept = [w for w in spaced.split() if w.lower() not in ("kernel", "cuda", "gpu", "impl", "cu", "v2")]
    return " ".join(w.lower() for w in kept) or identifier
