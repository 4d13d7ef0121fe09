"""A convolutional network in channels_last with bf16: convolutions and fused norms, GPU busy."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "Convolutions in NHWC take most of the GPU's time; the GPU is busy, and the input arrives on time.",
    "cause": None,
    "also": ["elementwise-chain"],
    "never": ["layout-conversion", "launch-bound", "data-loading", "host-sync"],
    "healthy": True,
}

m = Machine(91)
CONV = "sm90_xmma_{}_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1"
for _ in range(4):
    with m.step():
        with m.range("forward"):
            for layer in range(50):
                m.kernel(CONV.format("fprop"), 150.0 + layer, op="aten::cudnn_convolution")
                m.kernel(
                    "void cudnn::bn_fw_tr_1C11_kernel_NHWC<__half2, int, 512>(Params)",
                    33.0,
                    op="aten::cudnn_batch_norm",
                )
        with m.range("backward"), m.backward():
            for layer in reversed(range(50)):
                with m.node("CudnnBatchNormBackward0", 500 + layer):
                    m.kernel("void cudnn::bn_bw_1C11_kernel_NHWC<__half2, float, 512>(Params)", 48.0)
                with m.node("ConvolutionBackward0", 600 + layer):
                    m.kernel(CONV.format("dgrad"), 155.0 + layer, op="aten::convolution_backward")
                    m.kernel(CONV.format("wgrad"), 170.0 + layer, op="aten::convolution_backward")
        with m.range("Optimizer.step#SGD.step"):
            m.kernel(
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>(int)", 140.0
            )
        m.item()
write(m, "resnet.json.gz", python=False)
