"""A diffusion-like network in eager mode: convolutions, and around each of them ten elementwise kernels."""

from _machine import Machine
from _model import moved
from _nsys import write

CASE = {
    "truth": "GroupNorm, SiLU, scale and shift run as separate memory-bound kernels and take 70% of the GPU's time.",
    "cause": "elementwise-chain",
    "also": [],
    "never": ["launch-bound", "host-sync", "data-loading"],
    "healthy": False,
}

m = Machine(41, ranges="denoise")
names = ("mul", "add", "sigmoid", "mul", "pow", "mean", "rsqrt", "sub", "mul", "add")
for _ in range(8):
    with m.step():
        for _ in range(30):
            m.kernel("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", 340.0)
            for name in names:
                kernel = f"void at::native::vectorized_elementwise_kernel<8, at::native::{name}_functor<c10::BFloat16> >(int)"
                m.kernel(kernel, moved(2 * 1.0e8))
        m.item()
write(m, "unet.sqlite")
