"""Names of PyTorch's own kernels: which functor an elementwise kernel applies, what a reduction reduces."""

from __future__ import annotations

import re

from .base import KernelName, dtypes_in, words

_LOOPS = re.compile(
    r"(?P<loop>vectorized_elementwise_kernel|unrolled_elementwise_kernel|elementwise_kernel_with_index|"
    r"vectorized_templated_elementwise_kernel|legacy_elementwise_kernel|elementwise_kernel|"
    r"distribution_elementwise_grid_stride_kernel|index_elementwise_kernel)<(?P<args>.*)"
)
_VECTOR = re.compile(r"^(?:\(int\))?(\d+)[,<]")

# Functors with a short name of their own: (pattern in the arguments, operation). The first match wins.
_FUNCTORS = (
    (r"FillFunctor", "fill"),
    (r"CUDAFunctor(?:OnSelf|OnOther)?_add", "add"),
    (r"MulFunctor", "mul"),
    (r"DivFunctor", "div"),
    (r"BinaryDivTrueKernel|div_true_kernel", "div"),
    (r"pow_tensor", "pow"),
    (r"(?:bfloat16|float16|float8\w*|direct)_copy_kernel", "copy"),
    (r"bfloat16tofloat32_copy_kernel", "copy"),
    (r"CompareEqFunctor", "eq"),
    (r"Compare\w*Functor", "compare"),
    (r"GeluBackwardCUDAKernelImpl|GeluBackward", "gelu_backward"),
    (r"GeluCUDAKernelImpl", "gelu"),
    (r"silu_backward_kernel", "silu_backward"),
    (r"silu_kernel", "silu"),
    (r"threshold_kernel_impl", "threshold_backward"),
    (r"clamp_min_scalar|\brelu_kernel", "relu"),
    (r"launch_clamp_scalar|clamp_kernel", "clamp"),
    (r"\bsigmoid_backward", "sigmoid_backward"),
    (r"\bsigmoid_kernel", "sigmoid"),
    (r"\btanh_backward", "tanh_backward"),
    (r"\btanh_kernel", "tanh"),
    (r"hardswish_backward", "hardswish_backward"),
    (r"leaky_relu_backward", "leaky_relu_backward"),
    (r"masked_fill_kernel", "masked_fill"),
    (r"masked_scale_kernel", "masked_scale"),
    (r"where_kernel_impl", "where"),
    (r"addcmul", "addcmul"),
    (r"addcdiv", "addcdiv"),
    (r"lerp", "lerp"),
    (r"BUnaryFunctor|AUnaryFunctor|BinaryFunctor", "binary operation"),
)
_KERNEL_IN_ARGS = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(\w+?)(?:_kernel\w*|KernelImpl\w*|_cuda\w*)\b")

_REDUCTIONS = (
    (r"sum_functor", "sum"),
    (r"MeanOps", "mean"),
    (r"WelfordOps", "var_mean"),
    (r"NormTwoOps|NormOps", "norm"),
    (r"MaxNanFunctor|MaxOps|max_values", "max"),
    (r"MinNanFunctor|MinOps|min_values", "min"),
    (r"ArgMaxOps", "argmax"),
    (r"ArgMinOps", "argmin"),
    (r"prod_functor", "prod"),
    (r"and_kernel|func_wrapper_t<bool.*and", "all"),
    (r"or_kernel|func_wrapper_t<bool.*or", "any"),
)

# Kernels by name: (pattern, operation, family). The first match wins.
_KERNELS = (
    (r"multi_tensor_apply_kernel", "foreach", "optimizer"),
    (r"cunn_SoftMaxForward|softmax_warp_forward|SoftMaxForward\w*|softmax_forward", "softmax", "softmax"),
    (r"SoftMaxBackward|softmax_warp_backward|softmax_backward", "softmax_backward", "softmax"),
    (
        r"layer_norm_grad_input|GammaBetaBackward|cuComputeGradInput|LayerNormBackward",
        "native_layer_norm_backward",
        "norm",
    ),
    (r"layer_norm|RowwiseMoments|LayerNormForward", "native_layer_norm", "norm"),
    (r"rms_?norm\w*backward", "rms_norm_backward", "norm"),
    (r"rms_?norm", "rms_norm", "norm"),
    (r"batch_norm\w*backward|bn_bw", "native_batch_norm_backward", "norm"),
    (r"batch_norm|bn_fw", "native_batch_norm", "norm"),
    (r"group_norm|GroupNorm", "native_group_norm", "norm"),
    (r"fused_dropout|dropout", "native_dropout", "random"),
    (r"distribution_|philox|random_|bernoulli|normal_|uniform_", "random numbers", "random"),
    (
        r"embedding_backward|compute_grad_weight|embedding_bag|sum_and_scatter|krn_partial",
        "embedding_dense_backward",
        "index",
    ),
    (r"indexSelect|vectorized_gather|gather|index_select", "index_select", "index"),
    (r"scatter|index_put|indexing_backward|index_", "index_put", "index"),
    (r"nll_loss|cross_entropy|ctc_loss|smooth_l1|mse_", "loss", "loss"),
    (r"max_pool|avg_pool|adaptive_\w*pool|pool", "pooling", "pool"),
    (r"CatArray", "cat", "copy"),
    (r"upsample|interpolate|grid_sampl", "upsample", "index"),
    (r"triu_tril", "triu", "elementwise"),
    (r"RadixSort|bitonicSort|radixSort|sort|topk|TopK", "sort", "sort"),
    (r"DeviceScan|tensor_kernel_scan|cumsum|scan", "cumsum", "reduction"),
    (r"unique|DeviceSelect|nonzero|flag", "nonzero", "index"),
    (r"roll_|flip_", "roll", "copy"),
    (r"im2col|col2im|vol2col", "im2col", "convolution"),
    (r"conv_depthwise|conv\w*2d|depthwise", "depthwise convolution", "convolution"),
    (r"arange|linspace|range_", "arange", "fill"),
    (r"transpose|permute", "transpose", "copy"),
    (r"amp_(?:update|unscale|non_finite)", "gradient scaler", "optimizer"),
)
_OPTIMIZERS = (("Adam", "AdamW"), ("SGD", "SGD"), ("Lamb", "LAMB"), ("UnaryOp", "unary"), ("BinaryOp", "binary"))


def decode_pytorch(name: str) -> KernelName | None:
    """A kernel of PyTorch, else None."""
    if "at::" not in name and "at_cuda_detail" not in name:
        # Some of PyTorch's templates lie outside of its namespace.
        found = _by_function(name) if "(anonymous namespace)::" in name else None
        return found if found is not None and found.family != "other" else None
    if match := _LOOPS.search(name):
        return _elementwise(match, name)
    if re.search(r"(?<!multi_)reduce_kernel<", name):
        return _reduction(name)
    return _by_function(name)


def _elementwise(match: re.Match[str], name: str) -> KernelName:
    args = match["args"].split(">(", 1)[0]
    operation = _functor(re.sub(r"at::native::gpu_kernel_impl\w*<", "", args))
    # MulFunctor<float> of a BinaryFunctor<c10::BFloat16, ...> computes in float32, of tensors in bfloat16.
    types = dtypes_in(re.sub(r"(binary_internal::\w+)<[\w:]+>", r"\1", args))
    details = {"functor": operation, "loop": match["loop"].removesuffix("_kernel")}
    if types:
        details["dtypes"] = ", ".join(types)
    if form := re.search(r"Gelu\w*CUDAKernelImpl\(.*?\)::\{lambda\(\)#([12])\}", args):  # in the order of its branches
        details["form"] = "tanh" if form.group(1) == "1" else "erf"
    if match["loop"].startswith("vectorized") and (width := _VECTOR.match(args)):
        details["vector"] = f"{width.group(1)} elements an access"
    if "distribution" in match["loop"]:
        return KernelName(f"random numbers{_of(types)} (PyTorch)", "random", "PyTorch", details, ("random",))
    family = {"copy": "copy", "fill": "fill", "arange": "fill"}.get(operation, "elementwise")
    if match["loop"].startswith("index_"):
        family = "index"
    return KernelName(f"{operation}{_of(types)} (PyTorch)", family, "PyTorch", details, (operation,))


def _of(types: list[str]) -> str:
    return f" of {' and '.join(types[:2])}" if types else ""


def _functor(args: str) -> str:
    for pattern, operation in _FUNCTORS:
        if re.search(pattern, args):
            return operation
    if found := _KERNEL_IN_ARGS.search(args):
        return words(found.group(1)).replace(" ", "_")
    if found := re.search(r"at::native::(?:\(anonymous namespace\)::)?(\w+)", args):
        return words(re.sub(r"Functor|Op$", "", found.group(1))).replace(" ", "_")
    return "elementwise"


def _reduction(name: str) -> KernelName:
    # What is read and what is written; sums have a type of their own in between.
    ends = re.search(r"ReduceOp<([\w:]+),.*unsigned int, ([\w:]+), \d", name)
    types = dtypes_in(", ".join(ends.groups()) if ends else name)
    operation = next((op for pattern, op in _REDUCTIONS if re.search(pattern, name)), "reduction")
    details = {"reduces by": operation} | ({"dtypes": ", ".join(types)} if types else {})
    return KernelName(f"{operation}{_of(types)}, a reduction (PyTorch)", "reduction", "PyTorch", details, (operation,))


def _by_function(name: str) -> KernelName:
    head = name.split(">(", 1)[0]
    function = _function_name(name)
    types = dtypes_in(head)
    details = {"function": function} | ({"dtypes": ", ".join(types)} if types else {})
    for pattern, operation, family in _KERNELS:
        if not re.search(pattern, name if family == "optimizer" or "cub::" in name else function, re.IGNORECASE):
            continue
        what = operation
        if operation == "foreach":
            optimizer = next((text for part, text in _OPTIMIZERS if part in name), "")
            what = f"{optimizer or 'one operation'} on many tensors at once"
            details["foreach"] = optimizer or words(function)
        return KernelName(f"{what}{_of(types)} (PyTorch)", family, "PyTorch", details, (operation,))
    # PyTorch names its functions after what they do.
    return KernelName(f"{words(function)}{_of(types)} (PyTorch)", "other", "PyTorch", details, (words(function),))


def _function_name(name: str) -> str:
    """The function's own name, without namespaces, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
    depth, kept = 0, []
    for char in plain:
        if char in "<(":
            if char == "(" and depth == 0:
                break
            depth += 1
        elif char in ">)":
            depth -= 1
        elif depth == 0:
            kept.append(char)
    return "".join(kept).split("::")[-1].strip() or plain
