"""A stencil in CUDA C++ under nsys, with its own ranges."""

from _machine import Machine
from _nsys import write

CASE = {
    "truth": "A CUDA C++ stencil: 400 kernels of 0.8 ms without gaps; a copy in at the start, a copy out at the end.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "host-sync", "data-loading", "pageable-copies"],
    "healthy": True,
}

m = Machine(85, gpu="NVIDIA A100-SXM4-80GB", ranges="timestep")
m.copy("HtoD", 1e8, op=None)
with m.range("solve"):
    for _ in range(200):
        m.kernel("stencil7(double const*, double*, int, int, int)", 830.0, grid=(64, 64, 8), block=(32, 8, 1))
        m.kernel("boundary(double*, int, int, int)", 42.0, grid=(512, 1, 1), block=(128, 1, 1))
    m.synchronize()
m.copy("DtoH", 1e8, op=None)
m.synchronize()
write(m, "stencil.sqlite")
