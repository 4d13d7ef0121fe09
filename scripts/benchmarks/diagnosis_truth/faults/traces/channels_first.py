"""A convolutional network in bf16 with NCHW tensors: cuDNN converts each of them to NHWC and back."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "Conversions between NCHW and NHWC around each convolution take 45% of the GPU's time; use channels_last.",
    "cause": "layout-conversion",
    "also": ["elementwise-chain"],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(52)
CONV = "sm90_xmma_{}_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1"
TO = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(Params)"
BACK = "void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float, true, false>(Params)"


def convolution(op: str, kind: str, us: float) -> None:
    with m.op(op):
        m.kernel(TO, us * 0.45)
        m.kernel(TO, us * 0.1)
        m.kernel(CONV.format(kind), us)
        m.kernel(BACK, us * 0.45)


for _ in range(4):
    with m.step():
        with m.range("forward"):
            for layer in range(40):
                convolution("aten::cudnn_convolution", "fprop", 90.0 + layer)
                m.kernel("void at::native::vectorized_elementwise_kernel<8, relu_functor>(int)", 26.0, op="aten::relu_")
        with m.range("backward"), m.backward():
            for layer in reversed(range(40)):
                with m.node("ConvolutionBackward0", 200 + layer):
                    convolution("aten::convolution_backward", "dgrad", 95.0 + layer)
                    convolution("aten::convolution_backward", "wgrad", 99.0 + layer)
        with m.range("Optimizer.step#SGD.step"):
            m.kernel(
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>(int)", 120.0
            )
        m.item()
write(m, "resnet.json.gz", python=False)
