"""A benchmark of Triton kernels under torch.profiler."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "Two Triton kernels run back to back, 0.4 ms each, without gaps.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "unfused-attention", "fp32-products"],
    "healthy": True,
}

m = Machine(86)
for _ in range(60):
    m.kernel("_fwd_kernel_flash", 410.0, api="cuLaunchKernelEx", grid=(64, 32, 1), block=(128, 1, 1))
    m.kernel("matmul_kernel_persistent", 395.0, api="cuLaunchKernelEx", grid=(132, 1, 1), block=(256, 1, 1))
m.synchronize()
write(m, "triton.json", python=False)
