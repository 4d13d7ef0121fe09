"""Causal visibility of keys, defined for all backends.

Causal attention of unequal lengths has two alignments. `upper_left` (torch's `is_causal`): query i sees keys 0…i.
`lower_right` (flash-attn ≥ 2.1): the last query sees the last key, as when decoding. In both, query i sees the keys j ≤
i + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cs_systems.core.shapes import causal_offset as causal_offset
from cs_systems.core.validation import ConfigError, is_whole, shown
from cs_systems.model.attention import AttentionCall


def hidden_keys(seq_q: int, seq_k: int, align: str, device: torch.device, window: int | None = None) -> Tensor:
    """Return a (seq_q, seq_k) bool mask, True where a causal query does not see the key.

    window: each query sees only the last `window` keys up to its own.
    """
    offset = causal_offset(seq_q, seq_k, align)
    last_seen = torch.arange(offset, offset + seq_q, device=device)[:, None]
    keys = torch.arange(seq_k, device=device)
    hidden = keys > last_seen
    return hidden if window is None else hidden | (keys <= last_seen - window)


def hides_a_row(seq_q: int, seq_k: int, align: str, window: int | None = None) -> bool:
    """Return True if some causal query sees no key: the first, or with a window the last."""
    offset = causal_offset(seq_q, seq_k, align)
    return offset < 0 or (window is not None and seq_q + offset - window >= seq_k)


def check_window(window: int | None, causal: bool) -> None:
    """Raise ConfigError unless the window is absent, or positive and the call is causal."""
    if window is None:
        return
    if not causal:
        raise ConfigError(f"window={window} requires causal attention; pass causal=True, or leave out the window")
    if not is_whole(window) or window < 1:
        raise ConfigError(f"window is {shown(window)}; give a Python int of at least 1")


def uneven_heads(heads_q: int, heads_kv: int) -> str:
    """Return the reason why the heads of q cannot share the heads of k, with the remedy."""
    return f"q has {heads_q} heads and k has {heads_kv}; give q a multiple of the number of heads of k"


def repeat_kv_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the heads of k and v to match q: (batch, heads_kv, …) → (batch, heads, …).

    Raises ValueError unless q's number of heads is a multiple of the keys': 1 head of q and 2 of keys would give an
    output without heads.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(uneven_heads(q.shape[1], k.shape[1]))
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))


def has_two_readings(call: AttentionCall) -> bool:
    """Return True if `align` matters for this call."""
    return call.causal and call.seq_q != call.seq_k


def has_blind_queries(call: AttentionCall) -> bool:
    """Return True if some query of this call sees no key; its output is defined as 0, but the formula gives NaN."""
    return call.causal and hides_a_row(call.seq_q, call.seq_k, call.align)
