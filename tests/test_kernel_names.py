"""Kernel names in words: what each library's names hold, read by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import trace_builder as built

import fusedmlp.kernels
from fusedmlp.profiling.names import FAMILIES, decode
from fusedmlp.profiling.names.inductor import split_operations
from fusedmlp.profiling.names.ours import KERNELS

GEMMS = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT": {
        "dtypes": "bfloat16 -> bfloat16, sums in float32",
        "tile": "128x256",
        "K step": "64",
        "stages": "4",
        "cluster": "2x1",
        "layout": "TN",
        "epilogue": "bias",
        "arch": "sm90",
    },
    "nvjet_sm90_tst_64x8_64x16_1x2_h_bz_relubias_TNT": {"tile": "64x8", "epilogue": "relu bias"},
    "nvjet_hsh_64x8_64x16_4x1_v_bz_TNN": {"tile": "64x8", "stages": "16", "cluster": "4x1", "layout": "TN"},
    "nvjet_sm100_tst_64x32_64x16_2x1_2cta_v_bz_splitK_TNT": {"split": "along K", "pair of blocks": "yes"},
    "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN": {"tile": "64x64x128", "stages": "3"},
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x": {
        "dtypes": "bfloat16 -> bfloat16",
        "tile": "128x128x64",
        "layout": "TN",
        "arch": "sm90",
    },
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": {
        "dtypes": "bfloat16",
        "tile": "128x64",
        "K step": "64",
        "stages": "4",
        "layout": "TN",
        "arch": "ampere",
    },
    "ampere_fp16_s1688gemm_fp16_256x128_ldg8_relu_f2f_stages_32x1_nn": {
        "dtypes": "float16",
        "tile": "256x128",
        "stages": "1",
        "layout": "NN",
        "epilogue": "relu",
    },
    "volta_sgemm_64x32_nt": {"dtypes": "float32", "tile": "64x32", "layout": "NT"},
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x4_tn_align8>(Params)": {
        "dtypes": "bfloat16",
        "tile": "128x64",
        "stages": "4",
        "layout": "TN",
        "epilogue": "relu",
        "unit": "tensor cores",
    },
    "cutlass_80_simt_sgemm_128x64_8x5_nn_align1": {"unit": "CUDA cores", "tile": "128x64", "stages": "5"},
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_tnn_align8_epi_tma": {
        "tile": "128x128x64",
        "arch": "sm90",
    },
}


@pytest.mark.parametrize("name", GEMMS)
def test_products(name: str) -> None:
    found = decode(name)
    assert found.family == "gemm"
    assert {key: found.details.get(key) for key in GEMMS[name]} == GEMMS[name]
    assert GEMMS[name].get("tile", "") in found.text


OTHERS = [
    (built.GELU, "elementwise", "gelu of bfloat16", ("gelu",)),
    (built.GELU_BACKWARD, "elementwise", "gelu_backward of bfloat16", ("gelu_backward",)),
    (built.RELU, "elementwise", "clamp of bfloat16", ("clamp",)),
    (built.MUL, "elementwise", "mul of bfloat16", ("mul",)),
    (built.ADD, "elementwise", "add of bfloat16", ("add",)),
    (built.SUM, "reduction", "sum of bfloat16", ("sum",)),
    (built.elementwise("at::native::FillFunctor<float>"), "fill", "fill of float32", ("fill",)),
    (
        built.elementwise("at::native::(anonymous namespace)::rsqrt_kernel_cuda(x)::y"),
        "elementwise",
        "rsqrt",
        ("rsqrt",),
    ),
    (
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
        "::{lambda()#3}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int)",
        *("copy", "copy of float32", ("copy",)),
    ),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
        "FusedAdamMathFunctor<float, 4> >(x)",
        *("optimizer", "AdamW on many tensors at once", ("foreach",)),
    ),
    (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)",
        *("norm", "native_layer_norm of float32", ("native_layer_norm",)),
    ),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, int)",
        *("softmax", "softmax of float32", ("softmax",)),
    ),
    ("triton_poi_fused_gelu_mul_0", "elementwise", "gelu, mul", ("gelu", "mul")),
    (
        "triton_red_fused__to_copy_native_layer_norm_native_layer_norm_backward_3",
        *("reduction", "native_layer_norm_backward", ("_to_copy", "native_layer_norm", "native_layer_norm_backward")),
    ),
    ("triton_tem_fused_mm_0", "gemm", "mm", ("mm",)),
    (built.SPLIT, "gemm", "split along K", ()),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >(x)",)
    + ("attention", "attention forward", ("attention forward",)),
    (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(x)",
        "norm",
        "batch norm",
        ("batch norm",),
    ),
    (
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_kernel_cudnn",
        *("convolution", "convolution's weight gradient", ()),
    ),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "collective", "all-reduce", ("all-reduce",)),
    ("_rms_norm_forward_kernel", "norm", "rms norm forward", ()),
    ("Memcpy DtoD (Device -> Device)", "memcpy", "copy DtoD", ()),
    ("Memset (Device)", "memset", "memset", ()),
]


@pytest.mark.parametrize("name, family, text, operations", OTHERS, ids=lambda v: str(v)[:40])
def test_other_names(name: str, family: str, text: str, operations: tuple[str, ...]) -> None:
    found = decode(name)
    assert (found.family, found.operations) == (family, operations)
    assert text in found.text


def test_a_name_that_says_nothing_is_unknown() -> None:
    for name in ("k123", "_Z9kernel_17Pf", "void thing::run<3>(int)", ""):
        assert not decode(name).known, name


def test_every_decoded_family_is_listed() -> None:
    names = [*GEMMS, *(n for n, *_ in OTHERS), *KERNELS]
    assert {decode(n).family for n in names} <= set(FAMILIES)


def test_operations_are_split_at_the_longest_names_that_pytorch_knows() -> None:
    assert split_operations("_unsafe_view_add_gelu_backward_mul") == ("_unsafe_view", "add", "gelu_backward", "mul")
    assert split_operations("native_dropout__to_copy") == ("native_dropout", "_to_copy")
    assert split_operations("no_such_thing_mul") == ("no", "such", "thing", "mul")


def _launched() -> set[str]:
    """Functions of our kernel files that launchers import."""
    package = Path(fusedmlp.__file__).parent
    found = set()
    for path in (package / "launchers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernels."):
                found |= {alias.name for alias in node.names}
    return found


def test_every_kernel_that_we_launch_has_its_words() -> None:
    assert _launched() <= set(KERNELS), _launched() - set(KERNELS)
    for name in KERNELS:
        found = decode(name)
        assert found.library == "fusedmlp" and found.details["layer"] in found.text


@pytest.mark.parametrize("form", ["BinaryFunctor", "AUnaryFunctor"])
def test_what_a_functor_computes_in_is_no_type_of_its_tensors(form: str) -> None:
    functor = "at::native::binary_internal::MulFunctor<float>"
    name = built.elementwise(f"at::native::{form}<c10::BFloat16, c10::BFloat16, c10::BFloat16, {functor} >")
    assert decode(name).text == "mul of bfloat16 (PyTorch)"
    assert decode(name).details["dtypes"] == "bfloat16"


@pytest.mark.parametrize(
    "part, text", [("Wgrad", "convolution's weight gradient"), ("Dgrad", "convolution's input gradient")]
)
def test_a_convolution_with_transforms_and_layouts_is_no_layout_change(part: str, text: str) -> None:
    name = (
        f"_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS4_52Conv2d{part}OutputGradient"
        "TileAccessIteratorOptimizedINS_9transform29PitchLinearWarpRakedThreadMapINS_6layout40ColumnMajorEEEvNT_6ParamsE"
    )
    assert (decode(name).text, decode(name).family) == (f"{text} (cuDNN)", "convolution")


LOOP = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
NEG = "neg_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(c10::BFloat16)#1}>(x)"
SUM = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<{0}, at::native::func_wrapper_t<{1}, "
SUM += "at::native::sum_functor<{0}, float, {1}>::operator()(at::TensorIterator&)>, unsigned int, {1}, 4, 4> >(x)"


@pytest.mark.parametrize(
    "name, text",
    [
        (LOOP + NEG, "neg of bfloat16 (PyTorch)"),
        (SUM.format("c10::BFloat16", "c10::BFloat16"), "sum of bfloat16, a reduction (PyTorch)"),
        (SUM.format("c10::BFloat16", "float"), "sum of bfloat16 and float32, a reduction (PyTorch)"),
        (
            "void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>(x)",
            "cat (PyTorch)",
        ),
        (
            "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, float)",
            "attention backward, dQ to the result's dtype (cuDNN)",
        ),
        (
            "void cask_plugin__5x_cudnn::init_device_workspace_kernel<xmma::implicit_gemm::fprop::Params, bool>(x)",
            "convolution (cuDNN)",
        ),
    ],
)
def test_types_are_those_of_tensors(name: str, text: str) -> None:
    assert decode(name).text == text


@pytest.mark.parametrize("name", ["hardtanh", "hardsigmoid", "leaky_relu", "hardtanh_backward", "hardsigmoid_backward"])
def test_names_that_end_in_another_activation(name: str) -> None:
    kernel = built.elementwise(
        f"at::native::(anonymous namespace)::{name}_kernel(at::TensorIteratorBase&)::{{lambda()#1}}"
    )
    assert decode(kernel).operations == (name,)
