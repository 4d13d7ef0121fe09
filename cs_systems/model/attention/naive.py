"""Reference attention by the formula: softmax(q kᵀ · scale) v, with the whole score matrix in memory.

Supports every call: any dtype and device, both alignments, seq_q ≠ seq_k, grouped heads. In float64 it is the reference
for all other backends.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cs_systems.formulas.cost import FULL_MATRIX, FULL_MATRIX_CUDA, AttentionAlgorithm
from cs_systems.instrument.annotate import annotate
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.model.attention._mask import check_window, hidden_keys, hides_a_row, repeat_kv_heads
from cs_systems.model.attention._refusals import cannot_run


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
    """Compute attention by the formula.

    q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head), where
    heads_kv divides heads. scale defaults to 1/√d_head. Softmax runs in the dtype of the scores, under autocast in
    float32. window: a causal query sees only the last `window` keys up to its own.
    """
    check_window(window, causal)
    k, v = repeat_kv_heads(q, k, v)
    seq_q, seq_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with annotate("scores"):
        # scaling q costs seq_q × d_head operations; scaling the scores would cost a pass over the largest tensor
        scores = (q * scale) @ k.transpose(-2, -1)
        if causal:
            hidden = hidden_keys(seq_q, seq_k, align, q.device, window)
            # Mask in place: matmul's backward needs its inputs, not its output.
            scores.masked_fill_(hidden, -math.inf)
    with annotate("softmax"):
        weights = torch.softmax(scores, dim=-1)
        if causal and hides_a_row(seq_q, seq_k, align, window):
            # A row of only −inf becomes NaN, and so does its gradient until the mask above hides the row.
            weights = weights.masked_fill(hidden, 0)
    with annotate("value"):
        return weights @ v


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    return FULL_MATRIX_CUDA if call.device == "cuda" else FULL_MATRIX


BACKEND = AttentionBackend(
    attention, cannot_run, algorithm=_algorithm, rounds_scores=True, full_matrix=True, has_window=True
)
