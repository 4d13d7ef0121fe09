"""Unfused reference path of torch's scaled_dot_product_attention: the score matrix is in memory, as in naive."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from cs_systems.formulas.cost import FULL_MATRIX, FULL_MATRIX_CUDA, AttentionAlgorithm
from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention._sdpa import sdpa_backend


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Return scores, weights and their gradients, as in naive.

    Half precision is computed in float32, in twice the bytes.
    """
    matrices = (FULL_MATRIX_CUDA if call.device == "cuda" else FULL_MATRIX).score_matrices
    forward, kept, backward = (2 * m if call.dtype in ("float16", "bfloat16") else m for m in matrices)
    return AttentionAlgorithm(score_matrices=(forward, kept, backward), torch_matmul=True)


BACKEND = sdpa_backend(
    SDPBackend.MATH, _algorithm, ("float64", "float32", "float16", "bfloat16"),
    full_matrix=True, keeps={"autocast_score_matrices": None}, torch_kernel="math",
)  # fmt: skip
