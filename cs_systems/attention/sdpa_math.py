"""torch's scaled_dot_product_attention by its unfused reference path: the score matrix is in memory, as in naive."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from cs_systems.attention import AttentionCall
from cs_systems.attention._sdpa import sdpa_backend
from cs_systems.cost import AttentionAlgorithm


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    return AttentionAlgorithm(score_matrices=(2, 1, 3))


BACKEND = sdpa_backend(
    SDPBackend.MATH, _algorithm, {"float64": 1e-10, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
)
