"""Names of the other libraries' kernels: attention, cuDNN, NCCL, CUB, Triton kernels by anybody."""

from __future__ import annotations

import re

from .base import KernelName, dtypes_in, words

# (pattern, text, family, library); the first match wins.
_PATTERNS = (
    (r"flash_fwd|FlashAttnFwd|fmha_cutlassF|flash_fprop|fmha_v\d|sdpa\w*fprop", "attention forward", "attention"),
    (r"flash_bwd_dot_do_o|sdpa\w*compute_dot|dot_do_o", "attention backward, row sums", "attention"),
    (r"flash_bwd_convert|sdpa\w*convert_dq|convert_dq", "attention backward, dQ to the result's dtype", "attention"),
    (r"flash_bwd|FlashAttnBwd|fmha_cutlassB|flash_bprop|sdpa\w*bprop", "attention backward", "attention"),
    (r"fmha|sdpa|attention", "attention", "attention"),
    (r"nccl\w*AllReduce", "all-reduce", "collective"),
    (r"nccl\w*AllGather", "all-gather", "collective"),
    (r"nccl\w*ReduceScatter", "reduce-scatter", "collective"),
    (r"nccl", "collective", "collective"),
    (r"Conv\dd?Wgrad", "convolution's weight gradient", "convolution"),
    (r"Conv\dd?Dgrad", "convolution's input gradient", "convolution"),
    (r"ImplicitGemmConvolution", "convolution", "convolution"),
    (r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|transform\w*layout|NhwcPad\w*|pad_\w*kernel", "layout change", "copy"),
    (r"bn_fw|bn_fwd|batchnorm_fwd", "batch norm", "norm"),
    (r"bn_bw|bn_bwd|batchnorm_bwd", "batch norm backward", "norm"),
    (r"bn_\w+", "batch norm", "norm"),
    (r"pooling|max_pool|avg_pool", "pooling", "pool"),
    (r"winograd", "convolution by Winograd's transform", "convolution"),
    (r"dgrad", "convolution's input gradient", "convolution"),
    (r"wgrad", "convolution's weight gradient", "convolution"),
    (r"fprop|convolve|conv2d|conv3d|implicit_gemm|cudnn\w*conv|conv_", "convolution", "convolution"),
    (r"op_generic_tensor|op_tensor", "elementwise", "elementwise"),
    (r"DeviceRadixSort|RadixSort", "sort", "sort"),
    (r"DeviceScan|DeviceReduce|DeviceSelect", "scan or reduction", "reduction"),
)
_WORDS = (
    (r"matmul|gemm|(?:^|_)mm(?:_|$)|linear|dot", "gemm"),
    (r"attn|attention|flash", "attention"),
    (r"norm", "norm"),
    (r"softmax|cross_entropy|loss", "softmax"),
    (r"adam|sgd|optim", "optimizer"),
    (r"reduce|sum|mean", "reduction"),
    (r"copy|cast|transpose|pack|gather|scatter", "copy"),
    (
        r"add|mul|gelu|silu|relu|swiglu|geglu|act|elementwise|pointwise|rope|rotary|dropout|fwd|bwd|forward|backward",
        "elementwise",
    ),
)


def _library(name: str) -> str:
    known = {"pytorch_flash": "FlashAttention", "flash": "FlashAttention", "fmha_cutlass": "CUTLASS", "nccl": "NCCL"}
    known |= {"cub::": "CUB", "cublas": "cuBLAS", "cutlass": "CUTLASS"}
    if "cudnn" in name or "xmma" in name or "cask" in name:
        return "cuDNN"
    return next(
        (library for part, library in known.items() if part in name), "cuDNN" if "onvol" in name else "a library"
    )


def decode_library(name: str) -> KernelName | None:
    """A kernel of another library, recognised by its name; else None."""
    for pattern, text, family in _PATTERNS:
        if not re.search(pattern, name):
            continue
        library = _library(name)
        # The parameters behind the template's arguments are sizes and scales; bool is a switch.
        types = [t for t in dtypes_in(name.split(">(", 1)[0]) if t != "bool"]
        details: dict[str, str] = {"dtypes": ", ".join(types)} if types else {}
        if family == "attention" and (
            traits := re.search(r"kernel_traits<(?:\(int\))?(\d+), (?:\(int\))?(\d+), (?:\(int\))?(\d+)", name)
        ):
            details |= {"head width": traits.group(1), "tile": f"{traits.group(2)}x{traits.group(3)}"}
        elif tile := re.search(r"(\d+x\d+(?:x\d+)?)", name):
            details["tile"] = tile.group(1)
        of = f" in {types[0]}" if types else ""
        return KernelName(f"{text}{of} ({library})", family, library, details, (text,))
    return None


def decode_plain(name: str) -> KernelName | None:
    """A bare identifier, as Triton kernels have: the family by its words; else None."""
    if re.fullmatch(r"\w+", name) is None or name.startswith("_Z"):
        return None
    for pattern, family in _WORDS:
        if re.search(pattern, name, re.IGNORECASE):
            return KernelName(f"{words(name)} (Triton or CUDA kernel)", family, "custom", {"function": name})
    return None
