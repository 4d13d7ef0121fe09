"""torch's scaled_dot_product_attention by its unfused reference path: the score matrix is in memory, as in naive."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from cs_systems.attention import AttentionCall
from cs_systems.attention._sdpa import sdpa_backend
from cs_systems.cost import AttentionAlgorithm


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Scores, weights and their gradients, as in naive; half precision is computed in float32, in twice the bytes."""
    return AttentionAlgorithm(score_matrices=(4, 2, 6) if call.dtype in ("float16", "bfloat16") else (2, 1, 3))


BACKEND = sdpa_backend(SDPBackend.MATH, _algorithm, ("float64", "float32", "float16", "bfloat16"))
