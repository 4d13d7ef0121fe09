"""FlexAttention of torch, compiled: a kernel generated around a mask function, with hidden 128 × 128 blocks skipped.

Supports float32, float16 and bfloat16, both alignments, seq_q ≠ seq_k, grouped heads. CUDA: d_head ≥ 16. CPU: forward.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import TOLERANCE, AttentionBackend, AttentionCall
from cs_systems.model.attention._compile import compile_each_shape
from cs_systems.model.attention._mask import causal_offset, check_window
from cs_systems.model.attention._refusals import cannot_compile, wrong_dtype

DTYPES = ("float32", "float16", "bfloat16")
BLOCK = 128  # torch's default granularity of a BlockMask
LARGE_MASK = 2**26  # elements; 64 MiB, or 8192 × 8192

_compiled = compile_each_shape(flex_attention)
_compiled_create = compile_each_shape(create_block_mask)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: str = "upper_left",
    window: int | None = None,
) -> Tensor:
    """Compute attention with FlexAttention.

    q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head). window: a
    causal query sees only the last `window` keys up to its own.
    """
    check_window(window, causal)
    # a caller that is being compiled traces the mask into its own graph, where the cache cannot be used
    blocks = _causal_blocks if torch.compiler.is_compiling() else _kept_blocks
    mask = blocks(q.shape[-2], k.shape[-2], align, q.device, window) if causal else None
    out: Tensor = _compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


def _causal_blocks(seq_q: int, seq_k: int, align: str, device: torch.device, window: int | None) -> BlockMask:
    """Return the mask of the score blocks: fully, partly or not visible; the same for every batch and head."""
    offset = causal_offset(seq_q, seq_k, align)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query + offset
        return seen if window is None else seen & (key > query + offset - window)

    # Compiled code counts blocks without storing the seq_q × seq_k mask; for a small mask, compiling costs more.
    create = _compiled_create if seq_q * seq_k > LARGE_MASK else create_block_mask
    mask: BlockMask = create(sees, None, None, seq_q, seq_k, device=device)
    return mask


_kept_blocks = lru_cache(maxsize=32)(_causal_blocks)


def _unavailable(call: AttentionCall) -> str | None:
    if reason := wrong_dtype(call, DTYPES) or cannot_compile(call.device):
        return reason
    if call.device == "cpu" and call.needs_backward:
        return "FlexAttention has no backward on the CPU; use mode forward, or attention sdpa_flash"
    if call.device == "cuda" and call.d_head < 16:
        return f"FlexAttention supports d_head 16 and more, got {call.d_head}; use naive or sdpa_math"
    group = call.heads_q // call.heads_kv
    if call.device == "cuda" and group & (group - 1):
        return f"FlexAttention supports 1, 2, 4, … query heads per key head, got {group}; use naive or sdpa_math"
    return None


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    padded = 1 << (call.d_head - 1).bit_length() if call.device == "cuda" else None
    return AttentionAlgorithm(BLOCK, BLOCK, padded, backward_matmuls=5)


BACKEND = AttentionBackend(
    attention,
    unavailable=_unavailable,
    tolerance={dtype: TOLERANCE[dtype] for dtype in DTYPES},
    algorithm=_algorithm,
    has_window=True,
)
