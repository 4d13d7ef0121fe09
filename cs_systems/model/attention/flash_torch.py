"""FlashAttention-2 in plain PyTorch, as the readable specification of the fast kernels.

Algorithms 1 (forward) and 2 (backward) of Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and
Work Partitioning", with the paper's names. The score matrix S = scale · Q Kᵀ exists one tile at a time. Forward walks
the tiles of a block of queries with a running maximum and a running sum, and keeps of S only the log-sum-exp of each
row. Backward recomputes each tile from it. Memory is linear in the sequence length.

Supports every dtype and device, both alignments, seq_q ≠ seq_k, grouped heads. Tiles that causality hides are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.instrument.annotate import annotate
from cs_systems.instrument.attention_calls import as_operators
from cs_systems.model.attention import AttentionBackend
from cs_systems.model.attention._mask import causal_offset, repeat_kv_heads
from cs_systems.model.attention._operators import operators
from cs_systems.model.attention._refusals import cannot_run

B_Q = B_K = 128  # rows and columns of a tile of S


class FlashAttentionTorch(torch.autograd.Function):
    """Autograd function `apply(q, k, v, is_causal=False, scale=None, align="upper_left") -> out`.

    q: (…, seq_q, d); k, v: (…, seq_k, d), with the same leading dimensions. Saves q, k, v, out and one tensor of shape
    (…, seq_q): the natural logarithm of the sum of the exponentials of each row's scores, −inf where a row sees no key.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        align: str = "upper_left",
    ) -> Tensor:
        seq_q, seq_k = q.shape[-2], k.shape[-2]
        # Query i sees the keys j ≤ i + offset; without causality that is all of them.
        ctx.offset = causal_offset(seq_q, seq_k, align) if is_causal else seq_k
        ctx.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        with torch.autocast(q.device.type, enabled=False):  # autocast would round the tiles to half precision
            run = _forward if torch.compiler.is_compiling() or not as_operators() else _forward_op
            out, lse = run(q, k, v, is_causal, ctx.offset, ctx.scale)
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            run = _backward if torch.compiler.is_compiling() or not as_operators() else _backward_op
            d_q, d_k, d_v = run(q, k, v, out, lse, d_out, ctx.is_causal, ctx.offset, ctx.scale)
        return d_q, d_k, d_v, None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> tuple[Tensor, Tensor]:
    """Run algorithm 1: return out (…, seq_q, d) and the log-sum-exp (…, seq_q)."""
    exact = _accumulator(q)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=exact)
    for i in _blocks(q.shape[-2], B_Q):
        Q_i = q[..., i, :].to(exact)  # (…, B_Q, d)
        O_i = torch.zeros_like(Q_i)
        l_i = Q_i.new_zeros(Q_i.shape[:-1])  # (…, B_Q) running sum of exp(S − m)
        m_i = torch.full_like(l_i, torch.finfo(exact).min)  # running maximum: finite, so that −inf − m is never NaN
        for j in _blocks(k.shape[-2], B_K):
            if _all_hidden(i, j, offset):
                break  # all tiles to the right are hidden too
            K_j, V_j = k[..., j, :].to(exact), v[..., j, :].to(exact)  # (…, B_K, d)
            with annotate("scores"):
                S_ij = scale * Q_i @ K_j.mT  # (…, B_Q, B_K)
                if _some_hidden(i, j, offset):
                    S_ij.masked_fill_(_hidden(i, j, offset, q.device), -math.inf)
            with annotate("softmax"):
                m_new = torch.maximum(m_i, S_ij.amax(-1))
                P_ij = torch.exp(S_ij - m_new[..., None])
                rescale = torch.exp(m_i - m_new)  # the sums so far are relative to the old maximum
                l_i = rescale * l_i + P_ij.sum(-1)
                m_i = m_new
            with annotate("value"):
                O_i = rescale[..., None] * O_i + P_ij @ V_j
        # The row's maximum alone contributes 1 to l, so l < 1 only for a row that saw no key; its output is then 0 / 1
        # = 0.
        out[..., i, :] = O_i / l_i.clamp(min=1)[..., None]
        lse[..., i] = m_i + l_i.log()
    return out, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, causal: bool, offset: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run algorithm 2: return the gradients of q, k and v."""
    exact = lse.dtype
    d_q = torch.zeros_like(q, dtype=exact)  # summed over the outer loop in the wide dtype
    d_k, d_v = torch.empty_like(k), torch.empty_like(v)
    D = (d_out.to(exact) * out).sum(-1)  # (…, seq_q)
    for j in _blocks(k.shape[-2], B_K):
        K_j, V_j = k[..., j, :].to(exact), v[..., j, :].to(exact)  # (…, B_K, d)
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for i in _blocks(q.shape[-2], B_Q):
            if _all_hidden(i, j, offset):
                continue
            Q_i, dO_i = q[..., i, :].to(exact), d_out[..., i, :].to(exact)  # (…, B_Q, d)
            S_ij = scale * Q_i @ K_j.mT  # (…, B_Q, B_K)
            P_ij = torch.exp(S_ij - lse[..., i, None])
            if _some_hidden(i, j, offset):
                P_ij.masked_fill_(_hidden(i, j, offset, q.device), 0)  # also rows in which lse is −inf
            dV_j += P_ij.mT @ dO_i
            dP_ij = dO_i @ V_j.mT
            dS_ij = P_ij * (dP_ij - D[..., i, None])
            d_q[..., i, :] += scale * dS_ij @ K_j
            dK_j += scale * dS_ij.mT @ Q_i
        d_k[..., j, :], d_v[..., j, :] = dK_j, dV_j
    return d_q.to(q.dtype), d_k, d_v


_forward_op, _backward_op = operators("flash_torch", _forward, _backward)


def _accumulator(q: Tensor) -> torch.dtype:
    """Return the dtype in which scores, exponents and sums are computed: float32, or float64 for float64."""
    return torch.promote_types(q.dtype, torch.float32)


def _blocks(length: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` that cover `length`; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _all_hidden(i: slice, j: slice, offset: int) -> bool:
    """Return True if the last query of the tile does not see its first key."""
    return bool(j.start > i.stop - 1 + offset)


def _some_hidden(i: slice, j: slice, offset: int) -> bool:
    """Return True if the first query of the tile does not see its last key."""
    return bool(j.stop - 1 > i.start + offset)


def _hidden(i: slice, j: slice, offset: int, device: torch.device) -> Tensor:
    """Return a (B_Q, B_K) bool mask, True where a query of the tile does not see the key."""
    rows = torch.arange(i.start, i.stop, device=device)[:, None]
    return torch.arange(j.start, j.stop, device=device) > rows + offset


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: str = "upper_left",
) -> Tensor:
    """Compute attention tile by tile.

    q (batch, heads, seq_q, d); k, v (batch, heads_kv, seq_k, d) → (batch, heads, seq_q, d), where heads_kv divides
    heads.
    """
    k, v = repeat_kv_heads(q, k, v)
    out: Tensor = FlashAttentionTorch.apply(q, k, v, causal, scale, align)
    return out


BACKEND = AttentionBackend(
    attention,
    cannot_run,
    algorithm=lambda call: AttentionAlgorithm(B_Q, B_K, backward_matmuls=5, torch_matmul=True),
    keeps={"torch_matmul": True},
)
