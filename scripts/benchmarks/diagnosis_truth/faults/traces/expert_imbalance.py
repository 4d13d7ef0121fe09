"""Experts on four ranks; the router sends most tokens to rank 1's."""

from _kineto import write_ranks
from _machine import Machine, collective, step_of

CASE = {
    "truth": "Rank 1's experts get three times the tokens of the others, which wait for it in the second all-to-all of each layer.",
    "cause": "expert-imbalance",
    "also": ["straggler", "exposed-communication"],
    "never": ["launch-bound", "data-loading", "host-sync", "pipeline-bubble"],
    "healthy": False,
}

ranks = [Machine(68, rank=rank, world=4) for rank in range(4)]
GROUPED = "void cutlass::device_kernel<at::cuda::detail::GroupedGemm<cutlass::bfloat16_t, true> >(Params)"


def layer(backward: bool) -> None:
    scale = 2 if backward else 1
    for m in ranks:
        m.kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNN", 210.0 * scale, op="aten::mm", dims=[[8192, 1024], [1024, 3072]])
        m.kernel(
            "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128> >()", 160.0 * scale, op="aten::_flash_attention"
        )
    collective(ranks, "all_to_all", 3.2e7, 190.0, op="c10d::alltoall_base_")
    for m in ranks:
        us = 1500.0 if m.rank == 1 else 480.0
        m.kernel(GROUPED, us * scale, op="aten::_grouped_mm")
    collective(ranks, "all_to_all", 3.2e7, 190.0, op="c10d::alltoall_base_")


for _ in range(3):
    with step_of(ranks):
        for _ in range(6):
            layer(False)
        for _ in range(6):
            layer(True)
        for m in ranks:
            m.kernel(
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)", 700.0
            )
            m.synchronize()
write_ranks(ranks)
