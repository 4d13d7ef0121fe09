"""A compiled model: inductor's fused kernels between the products."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "A compiled training step; inductor's Triton kernels are fused, the products large, and the GPU busy.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "recompilation", "elementwise-chain", "host-sync"],
    "healthy": True,
}

m = Machine(87, op=2.0)
for _ in range(5):
    with m.step():
        with m.range("Torch-Compiled Region: 0/0"), m.op("CompiledFunction"):
            for _ in range(16):
                for us in (190.0, 240.0, 260.0):
                    m.kernel(
                        "nvjet_tst_128x256_64x4_2x1_v_bz_TNN",
                        us,
                        op="extern_kernels.mm",
                        dims=[[8192, 2048], [2048, 4096]],
                    )
                m.kernel("triton_red_fused_add_native_layer_norm_3", 38.0, api="cuLaunchKernel")
                m.kernel("triton_poi_fused_gelu_4", 55.0, api="cuLaunchKernel")
        with m.range("backward"), m.backward(), m.node("CompiledFunctionBackward", m.sequence):
            for _ in range(16):
                for us in (190.0, 195.0, 240.0, 250.0, 260.0, 270.0):
                    m.kernel("nvjet_tst_128x256_64x4_2x1_v_bz_NTN", us, op="extern_kernels.mm")
                m.kernel("triton_red_fused_native_layer_norm_backward_7", 61.0, api="cuLaunchKernel")
                m.kernel("triton_poi_fused_gelu_backward_8", 66.0, api="cuLaunchKernel")
        with m.range("Optimizer.step#AdamW.step"):
            for _ in range(6):
                m.kernel(
                    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)",
                    210.0,
                )
        m.item()
write(m, "compiled.json.gz", python=False)
