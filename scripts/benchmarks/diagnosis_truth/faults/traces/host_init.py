"""Twelve seconds in which the model is built on the CPU, then a benchmark with products in fp32."""

from _machine import Machine
from _model import GEMM
from _nsys import write

CASE = {
    "truth": "The benchmark keeps the GPU busy with fp32 products; the 12 s before it are the model's construction on the CPU.",
    "cause": "fp32-products",
    "also": ["start-up"],
    "never": ["launch-bound", "host-python", "data-loading"],
    "healthy": False,
}

m = Machine(4, gpu="NVIDIA A100-SXM4-80GB")
m.copy("HtoD", 1000, pinned=False, op=None)
with m.range("init_model"):
    m.host(12e6)
    m.copy("HtoD", 4e5, pinned=False, op=None)
with m.range("benchmark_loop"):
    for _ in range(1500):
        m.kernel("ampere_sgemm_128x64_tn", 990.0, block=(128, 1, 1))
    m.synchronize()
assert "fp32" in GEMM
write(m, "host_init.sqlite")
