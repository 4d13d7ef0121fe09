"""Gradient of the embedding table by Triton kernels; forward is the plain lookup.

The tokens are sorted by their row, and each row of the gradient is written once: the sum of its tokens' gradients in
float32, or in float64 for float64, or zeros. No atomic addition is needed, so the gradient is the same from run to run,
and no sum is rounded before it is complete. A frequent token is summed in parallel pieces.

Bytes, for N tokens, V rows, d_model D and s bytes per element: N·D·s read and V·D·s written, the least for this
gradient. torch.compile fills a float32 table with zeros, adds to it atomically and casts it: 8·V·D more in bfloat16,
and 8·N·D for the additions. torch's own kernels fill the table with zeros in another pass, and add to it row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.model.training.parts import Part
from cs_systems.model.training.triton_operators import check_one_device, has_rows, operator, prepared, unavailable
from cs_systems.model.transformer import Embedding


@operator(
    "embedding_gradient",
    "(Tensor d_out, Tensor tokens, int rows) -> Tensor",
    lambda d_out, tokens, rows: d_out.new_empty(rows, d_out.shape[-1]),
)
def _gradient(d_out: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Return the gradient (rows, D) of a table from the gradients (N, D) of its rows at tokens (N,)."""
    d_table = d_out.new_empty(rows, d_out.shape[-1])
    _GRADIENT.run((d_out, tokens), (d_table,), rows)
    return d_table


def _check(d_out: Tensor, tokens: Tensor) -> None:
    check_one_device(d_out, tokens)
    if d_out.ndim != 2 or tokens.shape != d_out.shape[:1]:
        raise ValueError(
            f"d_out has shape {tuple(d_out.shape)} and tokens {tuple(tokens.shape)}; pass "
            "(tokens, d_model) and (tokens,)"
        )


_GRADIENT = prepared("embedding.gradient", ("d_out", "tokens"), ("d_table",), _check, has_rows)


class Lookup(torch.autograd.Function):
    """Autograd function `apply(tokens, table)`: integers (...) and (V, D) → the rows of the table, (..., D)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = table.shape[0]
        return nn.functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        d_out = gradients[0]
        d_table: Tensor = _gradient(d_out.reshape(-1, d_out.shape[-1]), tokens.reshape(-1), ctx.rows)
        return None, d_table


class FusedEmbedding(Embedding):
    """Embedding with the kernels for its gradient."""

    def forward(self, indices: Tensor) -> Tensor:
        rows: Tensor = Lookup.apply(indices, self.weight)
        return rows


PART = Part(replaces="embedding gradient", classes={Embedding: FusedEmbedding}, unavailable=unavailable, on_ranks=True)
