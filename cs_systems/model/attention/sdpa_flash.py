"""FlashAttention-2 of torch: on CUDA in float16 and bfloat16; on the CPU, torch's own tiled kernel.

On CUDA: sm_80 or newer, d_head ≤ 256; causal with seq_q ≠ seq_k only as lower_right.
"""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention._sdpa import HALF, sdpa_backend

_PADDED = (32, 64, 96, 128, 160, 192, 256)  # head sizes for which CUDA kernels are built


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Return the forward tiles.

    On CUDA they come from FlashAttention-2's launch templates for sm_90, else from torch's CPU kernel.
    """
    if call.device == "cpu":
        block_q = 256 if call.seq_q >= 768 else 64 if call.seq_q >= 192 else 32
        return AttentionAlgorithm(min(block_q, call.seq_q), min(512, call.seq_k), backward_matmuls=5)
    d_head = next((d for d in _PADDED if d >= call.d_head), call.d_head)
    block_q, block_k = (128, 128) if d_head <= 64 else (128, 32) if d_head == 160 else (128, 64)
    block_q = 64 if d_head == 256 else block_q
    return AttentionAlgorithm(
        block_q, block_k, d_head, backward_matmuls=5, dq_accumulator_bytes=4, padded_queries=128, copies_by_head=True
    )


BACKEND = sdpa_backend(
    SDPBackend.FLASH_ATTENTION, _algorithm, ("float64", "float32", "float16", "bfloat16"), HALF,
    keeps={"dq_accumulator_bytes": 4}, torch_kernel="flash", one_operator="always",
)  # fmt: skip
