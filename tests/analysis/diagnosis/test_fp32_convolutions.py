"""Tests for fp32 work without tensor cores: convolutions count as products do, and the remedy fits the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.diagnosis import apply_rules
from cs_systems.analysis.diagnosis._evidence import of_trace
from cs_systems.analysis.diagnosis.unused_tensor_cores import FP32_KERNEL
from cs_systems.formulas.peaks import lacks_bf16
from tests.analysis.diagnosis.test_rules import traced

IN_FP32 = (
    "cudnn_volta_scudnn_128x64_relu_medium_nn_v1",
    "void cudnn::cnn::wgrad_alg1_engine<float, float, 512, 6, 5, 3, 3, 3, false, false>(int, int)",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::WinogradDataParams)",
    "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false, false, true>(int, int)",
)


@pytest.mark.parametrize("kernel", IN_FP32)
def test_convolution_in_fp32_is_named(kernel: str) -> None:
    rows: Any = [{"kernel": kernel, "family": family(kernel), "time_s": 0.08}]
    first = apply_rules(of_trace(traced(kernels=rows, phases=[]), "NVIDIA H200")).diagnoses[0]
    assert first.cause.startswith("80% of the step is convolutions in fp32")


@pytest.mark.parametrize(
    "kernel",
    [
        "volta_fp16_s884cudnn_fp16_128x64_ldg8_relu_f2f_exp_medium_nhwc_tn_v1",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<__half, __half>(cudnn::WinogradDataParams)",
        "sm86_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x32_stage3",
    ],
)
def test_convolution_with_tensor_cores_is_not_fp32(kernel: str) -> None:
    assert not FP32_KERNEL.search(kernel)


@pytest.mark.parametrize(
    ("gpu", "remedy"),
    [
        ("Tesla T4", "compute in fp16"),
        ("Tesla V100-SXM2-16GB", "compute in fp16"),
        ("NVIDIA GeForce RTX 2080 Ti", "compute in fp16"),
        ("Quadro RTX 6000", "compute in fp16"),
        ("NVIDIA RTX A4000", "compute in bf16"),
        ("NVIDIA GeForce RTX 3060", "compute in bf16"),
        ("NVIDIA A100-SXM4-40GB", "compute in bf16"),
    ],
)
def test_remedy_is_a_precision_that_the_gpu_has(gpu: str, remedy: str) -> None:
    rows: Any = [{"kernel": "volta_sgemm_64x64_nt", "family": "matmul", "time_s": 0.08}]
    first = apply_rules(of_trace(traced(kernels=rows, phases=[]), gpu)).diagnoses[0]
    assert first.remedy.startswith(remedy)
    assert lacks_bf16(gpu) is (remedy == "compute in fp16")
