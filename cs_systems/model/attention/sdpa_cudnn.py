"""Fused attention of cuDNN through torch. CUDA only, float16 and bfloat16, causal from the upper left."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention._sdpa import HALF, sdpa_backend


def _algorithm(call: AttentionCall) -> AttentionAlgorithm:
    """Return 128 × 128 tiles, the usual ones on Hopper.

    Executed FLOPs are an estimate here, because cuDNN does not publish its tiles.
    """
    return AttentionAlgorithm(128, 128, backward_matmuls=5)


BACKEND = sdpa_backend(SDPBackend.CUDNN_ATTENTION, _algorithm, HALF, torch_kernel="cudnn", one_operator="always")
