"""Names of matrix products: cuBLAS (nvjet, xmma, and the kernels named after an architecture), CUTLASS, and the helpers
that a product launches beside itself.

NVIDIA documents none of these names. What is read here is what the names of many products have in common; the letters
of a layout are those of the BLAS call, whose matrices lie column by column.
"""

from __future__ import annotations

import re

from .base import KernelName, dtype

_JET_DTYPES = {"h": "float16", "t": "bfloat16", "s": "float32", "d": "float64", "q": "float8_e4m3", "r": "float8_e5m2"}
_JET_DTYPES |= {"i": "int32", "b": "int8", "o": "float4"}
_PAIR = re.compile(r"^(\d+)x(\d+)$")
_TRIPLE = re.compile(r"^(\d+)x(\d+)x(\d+)$")
_JET_LAYOUT = re.compile(r"^[TN]{2,4}$")

_XMMA = re.compile(r"sm(?P<arch>\d+)_xmma_(?P<kind>gemm|fprop|dgrad|wgrad)(?P<rest>\w*)")
_XMMA_TYPES = re.compile(r"_((?:e4m3|e5m2|bf16|f16|tf32|f32|f64|i8|i32)+)_((?:bf16|f16|tf32|f32|f64|i8|i32)+)_(\w+?)_")
_ARCH = re.compile(
    r"(?P<arch>maxwell|volta|turing|ampere|hopper|blackwell)_(?:(?P<types>fp16|bf16|tf32|int8|f16|i8|h|s|d|f64)_?)?"
    r"(?P<math>[a-z]?\d*)?(?P<kind>[sdhci]?gemm)_?(?P<rest>\w*)"
)
_CUTLASS = re.compile(
    r"cutlass(?P<version>3x)?_(?:(?:sm)?(?P<arch>\d+)_)?(?P<unit>wmma_tensorop|tensorop|simt)_(?P<rest>\w+)"
)
_TILE = re.compile(r"(?:tilesize|^|_)(\d+x\d+(?:x\d+)?)(?=_|$)")
_STAGES = re.compile(r"stages?_?(\d+x\d+|\d+)|_(\d+x\d+)_(?=[tn]{2}_|[tn]{2}$)")
_LAYOUT = re.compile(r"_([tn]{2})(?:_?[tn])?(?=_|$)")

# Small kernels that belong to a product: (part of the name, what it does, family).
_HELPERS = (
    ("splitKreduce_kernel", "adds up the parts of a product that was split along K", "gemm"),
    ("cublasLt::epilogue", "bias gradient beside a product", "gemm"),
    ("gemvNSP", "matrix times vector", "gemm"),
    ("gemv2T", "transposed matrix times vector", "gemm"),
    ("gemv2N", "matrix times vector", "gemm"),
    ("gemvx", "matrix times vector", "gemm"),
    ("gemv", "matrix times vector", "gemm"),
    ("gemmk1", "product with K = 1", "gemm"),
    ("gemmSN", "product with a small side", "gemm"),
    ("dot_kernel", "dot product", "gemm"),
    ("reduce_1Block_kernel", "end of a dot product", "gemm"),
    ("scal_kernel", "scales a matrix", "gemm"),
    ("sgemm", "float32 product", "gemm"),
    ("dgemm", "float64 product", "gemm"),
    ("magma_", "product by MAGMA", "gemm"),
)

# Those that are no product: the time is the product's, the FLOP are in it already.
BESIDE = {"splitKreduce", "splitKreduce_kernel", "cublasLt::epilogue", "reduce_1Block_kernel", "scal_kernel"}


def decode_gemm(name: str) -> KernelName | None:
    """A matrix product or its helper, else None."""
    if "nvjet" in name:
        return _nvjet(name)
    if "ReduceSplitK" in name:
        return _split_reduction(name)
    if found := _XMMA.search(name):
        return _xmma(found)
    if found := _CUTLASS.search(name):
        return _cutlass(found)
    if found := _ARCH.search(name):
        return _arch(found)
    for part, text, family in _HELPERS:
        if part in name and "flash" not in name and "cudnn" not in name:
            return KernelName(f"{text} (cuBLAS)", family, "cuBLAS", {"role": part})
    return None


def _nvjet(name: str) -> KernelName:
    details: dict[str, str] = {}
    pairs: list[str] = []
    extras: list[str] = []
    for token in name[name.index("nvjet") :].split("_")[1:]:
        if re.fullmatch(r"sm\d+", token):
            details["arch"] = token
        elif _PAIR.match(token) or _TRIPLE.match(token):
            pairs.append(token)
        elif _JET_LAYOUT.match(token):
            details["layout"] = token[:2]
            details["layouts as named"] = token
        elif "dtypes" not in details and re.fullmatch(r"[hstdqrbio]{3,6}", token):
            details["dtypes"] = _jet_dtypes(token)
        else:
            extras.append(token)
    triples = _TRIPLE.match(pairs[0]) if pairs else None  # 64x64x128_3_32x32x128: tile, stages, tile of a warp
    parts = ("tile", "warp tile") if triples else ("tile", "step", "cluster")
    details |= dict(zip(parts, pairs, strict=False))
    if "step" in details:  # 64x4: steps of 64 along K, 4 of them in flight
        deep, stages = details.pop("step").split("x")[:2]
        details |= {"K step": deep, "stages": stages}
    for token in extras:
        _jet_extra(token, details)
    return _product("cuBLAS", details)


def _split_reduction(name: str) -> KernelName:
    """The reduction behind a split product of CUTLASS, or behind a convolution of cuDNN, which is one too."""
    details = {"role": "splitKreduce"}
    if "cudnn" in name:
        text = "adds up the parts of a convolution that was split (cuDNN)"
        return KernelName(text, "convolution", "cuDNN", details)
    text = "adds up the parts of a product that was split along K (CUTLASS)"
    return KernelName(text, "gemm", "CUTLASS", details)


def _jet_dtypes(letters: str) -> str:
    """ "tst": operands, sum, result; more letters where the operands differ."""
    named = [_JET_DTYPES.get(letter, letter) for letter in letters]
    operands = named[:-2] if len(named) > 2 else named[:1]
    return f"{' and '.join(dict.fromkeys(operands))} -> {named[-1]}, sums in {named[-2]}"


_EPILOGUE_PART = re.compile(r"bgrada|bgradb|bias|dgelu|drelu|gelu|relu|aux")
_EPILOGUE = re.compile(rf"({_EPILOGUE_PART.pattern})+")


def _jet_extra(token: str, details: dict[str, str]) -> None:
    if token in ("v", "h"):
        details["tile order"] = "down the columns" if token == "v" else "along the rows"
    elif token.isdecimal():
        details["stages"] = token
    elif token == "bz":
        details["beta"] = "0"
    elif token.startswith("coop"):
        details["warp groups"] = f"two share a tile ({token})"
    elif token == "splitK":
        details["split"] = "along K"
    elif token == "2cta":
        details["pair of blocks"] = "yes"
    elif _EPILOGUE.fullmatch(token):  # relubias: several in one
        details["epilogue"] = " ".join([*details.get("epilogue", "").split(), *_EPILOGUE_PART.findall(token)])


def _xmma(found: re.Match[str]) -> KernelName:
    rest = found["rest"]
    details = {"arch": f"sm{found['arch']}"}
    if types := _XMMA_TYPES.search(rest):
        details["dtypes"] = " -> ".join(dtype(_first(t)) for t in types.group(1, 2))
    _shared_details(rest, details)
    library = "cuDNN" if "cudnn" in rest or found["kind"] != "gemm" else "cuBLAS"
    if found["kind"] == "gemm":
        return _product(library, details)
    return _convolution(found["kind"], details)


def _first(types: str) -> str:
    """The first of types that are written without a break: bf16bf16 -> bf16."""
    return re.match(r"bf16|f16|tf32|f32|f64|i8|i32|e4m3|e5m2", types).group()  # type: ignore[union-attr]


def _convolution(kind: str, details: dict[str, str]) -> KernelName:
    what = {"fprop": "convolution", "dgrad": "convolution's input gradient", "wgrad": "convolution's weight gradient"}
    tile = f", {details['tile']} tile" if "tile" in details else ""
    return KernelName(f"{what[kind]}{tile} (cuDNN)", "convolution", "cuDNN", details | {"pass": kind})


def _cutlass(found: re.Match[str]) -> KernelName:
    rest = found["rest"]
    details = {"unit": "CUDA cores" if found["unit"] == "simt" else "tensor cores"}
    if found["arch"]:
        details["arch"] = f"sm{found['arch']}"
    types = re.findall(r"(?<![a-z0-9])(bf16|f16|tf32|f32|f64|s8|e4m3|e5m2)(?![a-z0-9])", rest.replace("_", " "))
    if types:
        details["dtypes"] = " -> ".join(dict.fromkeys(map(dtype, types)))
    elif "sgemm" in rest:
        details["dtypes"] = "float32"
    for kind in ("fprop", "dgrad", "wgrad"):
        if kind in rest:
            _shared_details(rest, details)
            return _convolution(kind, details)
    _shared_details(rest, details)
    return _product("CUTLASS", details)


def _arch(found: re.Match[str]) -> KernelName:
    rest = found["rest"]
    details = {"arch": found["arch"]}
    named = {"s": "float32", "h": "float16", "d": "float64", "f16": "float16", "": ""}
    types = found["types"] or found["kind"].removesuffix("gemm")
    spelt = named.get(types, dtype(types))
    if spelt:
        details["dtypes"] = spelt
    _shared_details(rest, details)
    return _product("cuBLAS", details)


def _shared_details(rest: str, details: dict[str, str]) -> None:
    """Tile, stages, layout and epilogue, which these names spell alike."""
    tiles = _TILE.findall(rest)
    if tiles:
        details["tile"] = tiles[0]
    if stages := _STAGES.search(rest):
        pair = (stages.group(1) or stages.group(2)).split("x")
        details["stages"] = pair[-1]
        if len(pair) == 2:
            details["K step"] = pair[0]
    if layout := _LAYOUT.search(rest):
        details["layout"] = layout.group(1).upper()
    for part in ("relu", "gelu", "bias"):
        if re.search(rf"(?<![a-z]){part}(?![a-z])", rest):
            details["epilogue"] = " ".join(filter(None, (details.get("epilogue"), part)))
    if re.search("split_?k", rest, re.IGNORECASE):
        details["split"] = "along K"
    if cluster := re.search(r"cluster(\d+x\d+(?:x\d+)?)|warpgroupsize(\d+x\d+x\d+)", rest):
        details["cluster"] = cluster.group(1) or cluster.group(2)


def _product(library: str, details: dict[str, str]) -> KernelName:
    kind = details.get("dtypes", "").split(" ")[0]
    parts = [f"{kind} product".strip()]
    if "tile" in details:
        parts.append(f"{details['tile']} tile")
    if "K step" in details and "stages" in details:
        parts.append(f"{details['stages']} stages of {details['K step']} along K")
    elif "stages" in details:
        parts.append(f"{details['stages']} stages")
    if details.get("cluster", "1x1") not in ("1x1", "1x1x1"):
        parts.append(f"cluster {details['cluster']}")
    if "layout" in details:
        parts.append(details["layout"])
    if "split" in details:
        parts.append("split along K")
    if "epilogue" in details:
        parts.append(f"{details['epilogue']} in the epilogue")
    return KernelName(f"{', '.join(parts)} ({library})", "gemm", library, details)
