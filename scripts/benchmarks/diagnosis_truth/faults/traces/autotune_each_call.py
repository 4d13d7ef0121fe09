"""cudnn.benchmark is on while the input's size changes in each step: every layer tries all its algorithms again."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "cudnn.benchmark tries seven algorithms for each convolution in every step, as the size always changes.",
    "cause": "autotuning",
    "also": ["host-sync", "device-allocation", "start-up"],
    "never": ["launch-bound", "data-loading", "fp32-products"],
    "healthy": False,
}

m = Machine(56)
for step in range(5):
    with m.step(), m.range("forward"):
        for _ in range(25):
            with m.op("aten::cudnn_convolution", [[16, 256, 64 + step, 64 + step], [256, 256, 3, 3]]):
                for algorithm in range(7):
                    m.call("cudaMalloc", m.about(90.0))
                    for _ in range(2):
                        m.kernel(
                            f"sm90_xmma_fprop_implicit_gemm_bf16_tilesize{32 << algorithm % 3}x128x64_v{algorithm}",
                            160.0,
                        )
                    m.call("cudaEventRecord", 2.0)
                    m.synchronize("event")
                    m.call("cudaFree", m.about(70.0))
                m.kernel("sm90_xmma_fprop_implicit_gemm_bf16_tilesize128x128x64_v2", 150.0)
            m.kernel("void at::native::vectorized_elementwise_kernel<8, relu_functor>(int)", 20.0, op="aten::relu_")
write(m, "trace.json.gz", python=False)
