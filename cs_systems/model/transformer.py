"""Pre-norm decoder BasicTransformerLM with RMSNorm, rotary embeddings and SwiGLU.

The attention function is an argument; this module has no distribution and no instrumentation. Shapes: B batch, S
sequence, D d_model, F d_ff, H heads, K = D / H head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError, ModelConfig
from cs_systems.core import plugins

Attention = Callable[..., Tensor]


class Linear(nn.Module):
    """Linear layer y = x Wᵀ, without bias: (..., in) → (..., out)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        std = math.sqrt(2 / (d_in + d_out))
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Embedding(nn.Module):
    """Lookup table of vectors: (...) int64 → (..., d)."""

    def __init__(self, count: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, d))
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3.0, b=3.0)

    def forward(self, indices: Tensor) -> Tensor:
        return nn.functional.embedding(indices, self.weight)


class RMSNorm(nn.Module):
    """RMS normalization over the last dimension, in fp32 or wider (Zhang & Sennrich 2019, eq. 4).

    Computes x / sqrt(mean(x²) + eps) · g.
    """

    def __init__(self, d: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotation of the adjacent pairs (2i, 2i+1) of a head by position · theta^(−2i/K) (Su et al. 2021, eq. 34)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, d_head: int, context_length: int, theta: float) -> None:
        super().__init__()
        frequency = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float32) / d_head)
        angle = torch.outer(torch.arange(context_length, dtype=torch.float32), frequency)  # (context, K/2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate (..., S, K); shape and dtype stay the same."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention: (B, S, D) → (B, S, D)."""

    def __init__(self, config: ModelConfig, attention: Attention, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention = attention
        self.q_proj = Linear(config.d_model, config.d_model)
        self.k_proj = Linear(config.d_model, config.d_model)
        self.v_proj = Linear(config.d_model, config.d_model)
        self.output_proj = Linear(config.d_model, config.d_model)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.rotated_heads(x)
        out = self.attention(q, k, v, causal=True)
        mixed: Tensor = self.output_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def rotated_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, S, D) to queries and keys, both rotated, and values: (B, H, S, K) each."""
        q, k, v = self.heads(x)
        return self.rope(q), self.rope(k), v

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project (B, S, D) to queries, keys and values: (B, H, S, K) each."""
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return tuple(y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected)


class SwiGLU(nn.Module):
    """Gated feed-forward layer w2(silu(w1 x) · w3 x) (Shazeer 2020, eq. 6): (B, S, D) → (B, S, D)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.gated(x))
        return out

    def gated(self, x: Tensor) -> Tensor:
        """Return silu(w1 x) · w3 x: (B, S, D) → (B, S, F)."""
        gated: Tensor = nn.functional.silu(self.w1(x)) * self.w3(x)
        return gated


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attn(ln1 x), then x + ffn(ln2 x)."""

    def __init__(self, config: ModelConfig, attention: Attention, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model)
        self.attn = SelfAttention(config, attention, rope)
        self.ln2 = RMSNorm(config.d_model)
        self.ffn = SwiGLU(config.d_model, config.d_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.ffn(self.ln2(x))
        return out


class BasicTransformerLM(nn.Module):
    """Causal language model: token ids (B, S) int64 → logits (B, S, V).

    attention: the name of a backend, or `(q, k, v, *, causal, scale, align) -> out` on (B, H, S, K).
    Raises ConfigError for an unknown backend and for a sequence longer than `config.context_length`.
    """

    def __init__(self, config: ModelConfig, attention: str | Attention = "naive") -> None:
        super().__init__()
        attend: Attention = plugins.get("attention", attention) if isinstance(attention, str) else attention
        self.config = config
        rope = RotaryEmbedding(config.d_head, config.context_length, config.rope_theta)
        self.token_embeddings = Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(TransformerBlock(config, attend, rope) for _ in range(config.num_layers))
        self.ln_final = RMSNorm(config.d_model)
        self.lm_head = Linear(config.d_model, config.vocab_size)

    def forward(self, token_ids: Tensor, *, with_head: bool = True) -> Tensor:
        """Return the logits; without the head, return its input (B, S, D)."""
        if token_ids.shape[-1] > self.config.context_length:
            raise ConfigError(
                f"sequence length {token_ids.shape[-1]} exceeds the model's context length "
                f"{self.config.context_length}; use a shorter sequence or a larger context_length"
            )
        x = self.token_embeddings(token_ids)
        for layer in self.layers:
            x = layer(x)
        if not with_head:
            normalized: Tensor = self.ln_final(x)
            return normalized
        logits: Tensor = self.lm_head(self.ln_final(x))
        return logits
