"""A scan over time in a custom kernel with eight blocks: the GPU counts as busy, and 124 of its 132 SMs have no work."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "selective_scan_fwd and _bwd run with 8 blocks on 132 SMs and take 85% of the GPU's time.",
    "cause": "low-occupancy",
    "also": [],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(55)
for _ in range(4):
    with m.step():
        with m.range("forward"):
            for _ in range(12):
                m.kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNN", 130.0, op="aten::mm", dims=[[4096, 1024], [1024, 4096]])
                scan = "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1> >(SSMParamsBase)"
                m.kernel(scan, 1100.0, op="SelectiveScanFn", grid=(1, 8, 1), block=(128, 1, 1))
        with m.range("backward"), m.backward():
            for layer in range(12):
                with m.node("SelectiveScanFnBackward", 400 + layer):
                    scan = "void selective_scan_bwd_kernel<Selective_Scan_bwd_kernel_traits<128, 16, 1> >(SSMParamsBwd)"
                    m.kernel(scan, 2300.0, grid=(1, 8, 1), block=(128, 1, 1))
                with m.node("MmBackward0", 420 + layer):
                    for _ in range(2):
                        m.kernel(
                            "nvjet_tst_128x256_64x4_2x1_v_bz_NTN",
                            135.0,
                            op="aten::mm",
                            dims=[[4096, 4096], [4096, 1024]],
                        )
        with m.range("Optimizer.step#AdamW.step"):
            m.kernel(
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)", 400.0
            )
        m.item()
write(m, "mamba.json.gz", python=False)
