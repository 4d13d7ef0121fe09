"""Naive attention through torch.compile: the effect of fusion alone. The score matrix is still in memory.

It compiles at the first call with each shape, which therefore belongs in the warm-up.
"""

from __future__ import annotations

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.model.attention._compile import compile_each_shape
from cs_systems.model.attention._refusals import cannot_compile, cannot_run
from cs_systems.model.attention.naive import attention


def _unavailable(call: AttentionCall) -> str | None:
    return cannot_run(call) or cannot_compile(call.device)


# like naive in forward and in the kept tensors; in backward the scores' gradient overwrites the weights' gradient
BACKEND = AttentionBackend(
    compile_each_shape(attention),
    unavailable=_unavailable,
    algorithm=lambda call: AttentionAlgorithm(score_matrices=(2, 1, 2), torch_matmul=True),
    rounds_scores=True,
    full_matrix=True,
    keeps={"score_matrices": (2, 1, 2), "autocast_score_matrices": None},
)
