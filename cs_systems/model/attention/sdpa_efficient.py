"""Memory-efficient attention kernel of torch (CUTLASS, from xFormers). CUDA only; also takes float32."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention._sdpa import sdpa_backend


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Return the tiles in the forward kernels' names (fmha_cutlassF_f16_aligned_64x128_rf_sm80)."""
    if call.d_head <= 64:
        return AttentionAlgorithm(64, 64, backward_matmuls=5, output_by_position=True)
    block_q = 32 if call.dtype == "float32" else 64
    return AttentionAlgorithm(block_q, 128, backward_matmuls=5, output_by_position=True)


BACKEND = sdpa_backend(
    SDPBackend.EFFICIENT_ATTENTION, _algorithm, ("float32", "float16", "bfloat16"),
    keeps={"output_by_position": True}, torch_kernel="efficient", one_operator="always",
)  # fmt: skip
