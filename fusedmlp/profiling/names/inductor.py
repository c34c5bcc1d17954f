"""Names of the kernels that torch.compile's Inductor writes: which operations are fused in them."""

from __future__ import annotations

import functools
import re

from .base import KernelName

_NAME = re.compile(r"^triton_(?P<kind>poi|red|per|tem|for|unk|mix|spl|tl)_(?:fused_?(?P<ops>\w*?)_?)?(?P<number>\d+)?$")
_KINDS = {
    "poi": ("pointwise", "elementwise"),
    "red": ("reduction", "reduction"),
    "per": ("reduction held in one block", "reduction"),
    "spl": ("split scan", "reduction"),
    "mix": ("mixed-order reduction", "reduction"),
    "tem": ("template", "gemm"),
    "for": ("many tensors at once", "optimizer"),
    "unk": ("kernel", "fused"),
    "tl": ("kernel", "fused"),
}
# What Inductor lists but does no arithmetic for.
VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"}
VIEWS |= {"reshape", "clone", "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "empty"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@functools.cache
def _aten_names() -> frozenset[str]:
    """Every operation that PyTorch knows, by its bare name."""
    import torch

    names = {s.name for s in torch._C._jit_get_all_schemas()}
    return frozenset(n.split("::")[1] for n in names if n.startswith(("aten::", "prims::"))) | {"convert_element_type"}


def split_operations(text: str) -> tuple[str, ...]:
    """``_to_copy_gelu_backward_mul`` -> its operations: at each point the longest name that PyTorch knows."""
    known = _aten_names()
    found: list[str] = []
    pieces = re.findall(r"_*[^_]+", text)  # a leading underscore belongs to the name that follows it
    at = 0
    while at < len(pieces):
        for end in range(len(pieces), at, -1):
            joined = "".join(pieces[at:end])
            bare = joined if joined in known else joined[1:] if joined.startswith("_") else joined
            if bare in known or end == at + 1:
                found.append(bare)
                at = end
                break
    return tuple(found)


def decode_inductor(name: str) -> KernelName | None:
    """A kernel of Inductor, else None."""
    match = _NAME.match(name)
    if match is None:
        return _template(name)
    what, family = _KINDS[match["kind"]]
    operations = split_operations(match["ops"] or "")
    work = tuple(op for op in operations if op not in VIEWS) or operations
    if match["kind"] in ("tem", "unk", "tl") and not _PRODUCTS & set(operations):
        family = "fused" if "attention" not in (match["ops"] or "") else "attention"
    listed = ", ".join(work) or "operations that its name leaves out"
    return KernelName(f"{what}: {listed} (Inductor)", family, "Inductor", {"kind": what}, operations)


def _template(name: str) -> KernelName | None:
    """Products that max-autotune chose from Inductor's own templates."""
    if re.fullmatch(r"triton_(mm|bmm|addmm|mm_plus_mm|flex_attention|flex_attention_backward)(_\d+)?", name) is None:
        return None
    operation = re.sub(r"^triton_|_\d+$", "", name)
    family = "attention" if "attention" in operation else "gemm"
    return KernelName(f"{operation} by a template (Inductor)", family, "Inductor", {"kind": "template"}, (operation,))
