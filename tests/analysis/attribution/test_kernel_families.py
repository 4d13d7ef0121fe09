"""Kernel families: real kernel names of libraries and compilers on three GPU generations."""

# ruff: noqa: E501 (names are quoted whole)

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.kernel_families import FAMILIES, RULES, family, short_name, short_scope
from cs_systems.readers.forms.trace import Trace

NAMES = {
    "matmul": [
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_sgemm_128x64_tn",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "ampere_fp16_s16816gemm_fp16_256x128_ldg8_relu_f2f_stages_64x3_tn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(T1::Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x4_nn_align8>(cutlass_80::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(Params)",
        "cutlass3x_sm100_tensorop_gemm_bf16_bf16_f32_bf16_bf16_256x256x64_0x0x1_0_tnt_align8_2sm",
        "cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_64x128x16_1x1x1_3_tnn_align1_bias_f32_relu",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
        "nvjet_sm100_tst_64x8_64x16_2x2_h_bz_splitK_bias_TNN",
        "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false>(cublasLt::cublasSplitKParams)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParamsEx)",
        "std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float>(cublasGemvParamsEx)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(cublasDotParams)",
        "triton_tem_fused_addmm_0",
        "triton_tem_fused__to_copy_mm_12",
        "triton_mm",
        "Cijk_Ailk_Bljk_HHS_BH_MT128x128x16_MI32x32x8x1_SN_1LDSB0_APM1_ABV0_ACED0_AF0EM8_AF1EM1_AMAS3",
        "void cudnn::cnn::dgrad2d_grouped_direct_kernel<float, int, float>(cudnn::cnn::dgrad_params)",
        "void dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*, int, float const*)",
        "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int, int, int, float const*)",
        "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false, false, true>(int, int, int)",
        "Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_137kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<float>>(Argument)",
        "_ZN5aiter19fmoe_int8_g1u0_smf_E",
        "rocblas_gemvn_kernel_calc<64, 16, int, float>",
        "MIOpenConvUni",
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "cudnn_infer_volta_scudnn_128x64_stridedB_interior_nn_v1",
        "void fft2d_r2c_16x16<float>(float2*, float const*, int, int, int, int, int, int, int, int)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false>>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16gmem",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm100_flash_bprop_f16_knob_3_128x128x128_4x1x1_cga1x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_3",
        *("flash_forward_kernel", "flash_dq_kernel", "flash_dkdv_kernel"),  # this project's own
        "_attn_fwd",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_24BlockFmhaPipelineQRKSVS",
        *("attn_fwd.kd", "bwd_kernel_dk_dv", "bwd_preprocess"),  # AOTriton's
        "aiter::fmha_bwd_hd128_bf16_causal",
        "sage_fwd",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float const*, int)",
        "void <unnamed>::softmax_warp_backward<float, float, float, (int)10, (bool)1, (bool)0>(T2 *, const T1 *)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<8, float, float, float>(float*, float const*)",
        "triton_red_fused__log_softmax_7",
        "triton_per_fused__softmax__to_copy_masked_fill_4",
    ],
    "norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(int, float)",
        "void at::native::<unnamed>::GammaBetaBackwardCUDAKernelTemplate<float, float, (unsigned int)32>(long, long)",
        "void at::native::<unnamed>::layer_norm_grad_input_kernel_vectorized<float, float, (bool)1>(const T1 *)",
        "void at::native::(anonymous namespace)::cuComputePartGradGammaBeta_rms_norm<float>(float const*)",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<>>(FwdParams)",
        "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0",
        "triton_red_fused__fused_rms_norm_0",
        "kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel_object_at__",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>(int)",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::silu_kernel>>(int)",
        "void at::native::triu_tril_kernel<bool, int, (bool)1, (int)8, (bool)0>(at::cuda::detail::TensorInfo<T1, T2>)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>()",
        "triton_poi_fused_add_mul_silu_3",
        "triton_poi_fused__scaled_dot_product_efficient_attention_1",
        "void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(ReduceOp)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        "void at::native::<unnamed>::embedding_backward_feature_kernel<float, float, long>(const T3 *, const T1 *)",
        "triton_red_fused__unsafe_view_mul_sum_0",
        "triton_per_fused_sum_view_9",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>(ReduceOp)",
        "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(float const*, long const*, int)",
        "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 5ul>(PackedTensorAccessor)",
    ],
    "copy": [
        "void at::native::elementwise_kernel<128, 2, gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda>>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(TensorIteratorBase&)>(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 3, 64, 64>(OpaqueType*)",
        *("__amd_rocclr_copyBuffer", "__amd_rocclr_fillBufferAligned"),
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "triton_poi_fused__to_copy_0",
        "triton_poi_fused_clone_transpose_2",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "[CUDA memcpy Host-to-Device]",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(nchw2nhwc_params)",
    ],
    "collective": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<float, 8>(vllm::RankData*)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    ],
    "optimizer": [
        "void at::native::<unnamed>::multi_tensor_apply_kernel<TensorListMetadata<(int)1>, BinaryOpScalarFunctor<float>>(T1)",
        "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(T1)",
        "triton_for_fused_0",
    ],
    "other": ["my_own_thing", "forward_kernel", "void at::native::sbtopk::computeBlockDigitCounts<float>(float const*)"],
}  # fmt: skip


@pytest.mark.parametrize(("expected", "name"), [(f, name) for f, names in NAMES.items() for name in names])
def test_family_of_real_kernel_names(expected: str, name: str) -> None:
    assert family(name) == expected


def test_every_family_has_a_rule_and_names() -> None:
    assert {family for family, _ in RULES} | {"other"} == set(FAMILIES) == set(NAMES)


def test_real_step_has_no_kernel_of_unknown_family(nsys_trace: Trace, kineto_trace: Trace) -> None:
    """Both profilers write the names of one program differently, but the families agree."""
    found = [Counter(family(k.function.name) for k in r.kernels) for r in (nsys_trace, kineto_trace)]
    assert found[0] == found[1]
    assert "other" not in found[0]
    assert found[0]["matmul"] == 105 * 3


OWN = re.compile(
    r"(?:KERNEL|__global__ void(?: __launch_bounds__\((?:[^()]|\([^()]*\))*\))?)\s+(\w+)\("  # CUDA
    r"|@triton\.jit(?:\([^)]*\))?\s+def (\w+_kernel)\(",
)


def test_kernels_of_this_package_have_a_family() -> None:
    folder = Path(__file__).parents[3] / "cs_systems" / "model" / "kernels"
    files = [file for ending in ("*.cu", "*.py") for file in folder.rglob(ending)]
    names = {cuda or triton for file in files for cuda, triton in OWN.findall(file.read_text(encoding="utf-8"))}
    assert {"attend_backward", "gated_backward", "update_weights", "attend_finish", "flash_dq_kernel"} <= names
    assert {name for name in names if family(name) == "other"} == set()
    attends = {name for name in names if name.startswith(("attend", "flash"))}
    assert {family(name) for name in attends} == {"attention"}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (NAMES["matmul"][0], "sm80_xmma_gemm tn 64x64x8"),
        (NAMES["matmul"][5], "cutlass_80_simt_sgemm_128x64_8x5_nt_align1"),
        (NAMES["matmul"][10], "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"),
        (NAMES["matmul"][14], "splitKreduce_kernel"),
        (NAMES["attention"][0], "flash_fwd_kernel"),
        (NAMES["softmax"][0], "softmax_warp_forward"),
        (NAMES["elementwise"][0], "elementwise add"),
        (NAMES["copy"][0], "elementwise direct_copy"),
        (NAMES["optimizer"][0], "foreach BinaryOpScalar"),
        (NAMES["matmul"][21], "Cijk_Ailk_Bljk_HHS 128x128x16"),
        (NAMES["matmul"][26], "Cijk_Alik_Bljk_BBS 256x256x64"),
        ("Cijk_Alik_Bljk_SB_MT64x16x32_MI16x16x1", "Cijk_Alik_Bljk_SB 64x16x32"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        ("_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastINS0_13BinaryFunctorIfffNS0_15binary_internal10DivFunctorIfEEEEEEvRNS_18TensorIteratorBaseERKT_EUliE_EEviT1_", "elementwise Div"),
        ("_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_6MaxOpsIfEEjfLi4EEEEEvT1_", "reduce Max"),
        ("_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_8PipelineIDF16bLi128EEEEEEvDpT1_", "FmhaFwdKernel"),
        ("_Z12add_parallelPfS_i", "add_parallel"),
        ("_Zed", "_Zed"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("", ""),
    ],
)  # fmt: skip
def test_short_name_keeps_the_operation(name: str, short: str) -> None:
    assert short_name(name) == short


def test_scopes_that_are_kernels_are_shortened() -> None:
    assert short_scope("· · _Z12add_parallelPfS_i") == "· · add_parallel"
    assert short_scope("_Z12add_parallelPfS_i") == "add_parallel"
    assert short_scope("· a::b_Z3abc") == "· a::b_Z3abc"
