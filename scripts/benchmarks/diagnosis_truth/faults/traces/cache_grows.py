"""A server decodes with a cache that is concatenated anew for each token: copies grow with every step."""

from _machine import Machine
from _nsys import write

CASE = {
    "truth": "The step's time grows linearly with its number, because torch.cat copies the whole cache for each token.",
    "cause": "growth",
    "also": ["elementwise-chain"],
    "never": ["launch-bound", "data-loading", "host-sync", "start-up"],
    "healthy": False,
}

m = Machine(58, ranges="decode_step")
for token in range(60):
    with m.step():
        for _ in range(24):
            m.kernel("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 9.0)
            for _ in range(2):
                copied = 1.5 + 3.1 * token
                m.kernel(
                    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4>(int)",
                    copied,
                )
            m.kernel("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >(Params)", 7.0)
        m.item()
write(m, "server.sqlite")
