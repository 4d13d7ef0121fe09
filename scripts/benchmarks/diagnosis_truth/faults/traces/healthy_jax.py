"""JAX under nsys: XLA's fusions and products, no gaps."""

from _machine import Machine
from _nsys import write

CASE = {
    "truth": "A jitted JAX step: XLA's fusions and cuBLAS products follow each other without gaps.",
    "cause": None,
    "also": [],
    "never": ["launch-bound", "unfused-optimizer", "host-sync", "data-loading"],
    "healthy": True,
}

m = Machine(92, ranges="train_step")
for _ in range(8):
    with m.step():
        for layer in range(24):
            m.kernel("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", 310.0)
            m.kernel(f"loop_add_multiply_fusion_{layer}", 48.0, api="cuLaunchKernel")
            m.kernel(f"input_reduce_fusion_{layer}", 35.0, api="cuLaunchKernel")
            m.kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1", 280.0)
        m.synchronize("stream")
write(m, "jax.sqlite")
