"""What a step, an attention call must cost: FLOPs, bytes, memory, by formula. Floor 0: no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionAlgorithm:
    """What an attention implementation really computes and keeps (declared by its backend).

    block_q, block_k: tile of the score matrix; None: the whole matrix is computed, visible or not. Tiles in which no query sees
        a key are skipped.
    d_head: the head size that the kernel computes with, where it pads; None: the call's.
    backward_matmuls: score-sized matrix products in backward: 4, or 5 where the scores are recomputed.
    score_matrices: (at the peak of forward, kept for backward, at the peak of backward): how many (heads, seq_q, seq_k) matrices
        of the call's dtype are alive; (0, 0, 0) for a tiled algorithm.
    """

    block_q: int | None = None
    block_k: int | None = None
    d_head: int | None = None
    backward_matmuls: int = 4
    score_matrices: tuple[float, float, float] = (0, 0, 0)


FULL_MATRIX = AttentionAlgorithm(score_matrices=(2, 1, 3))
