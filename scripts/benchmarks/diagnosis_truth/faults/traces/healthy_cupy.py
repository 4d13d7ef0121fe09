"""A CuPy program under nsys: products and elementwise kernels in a pipeline, without PyTorch."""

from _machine import Machine
from _nsys import write

CASE = {
    "truth": "A CuPy solver whose kernels follow each other without gaps; each lasts 0.2 to 2 ms.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "host-sync", "unfused-attention", "unfused-optimizer", "data-loading"],
    "healthy": True,
}

m = Machine(84, gpu="NVIDIA A100-SXM4-80GB")
m.copy("HtoD", 2e8, pinned=False, op=None)
for _ in range(120):
    m.kernel("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(float)", 1900.0)
    m.kernel("cupy_multiply__float32_float32_float32", 240.0, api="cuLaunchKernel")
    m.kernel("cupy_subtract__float32_float32_float32", 240.0, api="cuLaunchKernel")
    m.kernel("void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float>, float*>(float*)", 210.0)
m.copy("DtoH", 4e6, pinned=False, op=None)
m.synchronize()
write(m, "cupy.sqlite")
