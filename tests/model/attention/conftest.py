"""Helpers shared by the attention tests: cases, results of a backend, and relative errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cs_systems.model.attention import AttentionBackend, AttentionCall


@dataclass(frozen=True)
class Case:
    """Case of an attention call. layout: memory layout of q, k and v; grad: memory layout of the output's gradient."""

    seq_q: int = 130
    seq_k: int | None = None  # None: equal to seq_q
    batch: int = 1
    heads_q: int = 2
    heads_kv: int | None = None  # None: equal to heads_q
    d_head: int = 16
    causal: bool = False
    align: str = "upper_left"
    scale: float | None = None
    window: int | None = None
    layout: str = (
        "contiguous"  # or "transposed" (batch, seq, heads, d_head), or "packed" (batch, seq, 3, heads, d_head)
    )
    grad: str = "contiguous"  # or "transposed", or "expanded" (one number, as out.sum() gives)

    @property
    def key_length(self) -> int:
        return self.seq_q if self.seq_k is None else self.seq_k

    @property
    def kv_heads(self) -> int:
        return self.heads_q if self.heads_kv is None else self.heads_kv

    @property
    def options(self) -> dict[str, object]:
        return {"causal": self.causal, "scale": self.scale, "align": self.align, "window": self.window}

    def call(self, device: str, dtype: str, *, needs_backward: bool = True) -> AttentionCall:
        return AttentionCall(
            device, dtype, self.d_head, self.seq_q, self.key_length, self.heads_q, self.kv_heads,
            self.causal, self.align, needs_backward, self.window,
        )  # fmt: skip

    def inputs(self, device: str, dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return seeded q, k, v and output gradient, without requires_grad."""
        torch.manual_seed(0)
        like = {"device": device, "dtype": getattr(torch, dtype)}
        shapes = [(self.seq_q, self.heads_q), (self.key_length, self.kv_heads), (self.key_length, self.kv_heads)]
        if self.layout == "packed":
            packed = torch.randn(self.batch, self.seq_q, 3, self.heads_q, self.d_head, **like)
            q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        else:
            q, k, v = (
                torch.randn(self.batch, seq, heads, self.d_head, **like).transpose(1, 2) for seq, heads in shapes
            )
            if self.layout == "contiguous":
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        grad = torch.randn(self.batch, self.seq_q, self.heads_q, self.d_head, **like).transpose(1, 2)
        if self.grad == "expanded":
            grad = grad[:1, :1, :1, :1].expand_as(grad)
        return q, k, v, grad.contiguous() if self.grad == "contiguous" else grad


def results(backend: AttentionBackend, inputs: tuple[Tensor, ...], case: Case, *, backward: bool) -> list[Tensor]:
    """Return [out], or [out, dq, dk, dv] with backward."""
    *qkv, grad = inputs
    qkv = [x.detach().requires_grad_(backward) for x in qkv]  # detach keeps the layout
    out = backend(*qkv, **case.options)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)] if backward else [out]


def relative_error(got: Tensor, ref: Tensor) -> float:
    """Return ‖got − ref‖ / ‖ref‖, with a floor for references near 0.

    With one key the gradient of q is 0. The floor is a twentieth of the norm that unit variance gives.
    """
    floor = 0.05 * math.sqrt(ref.numel())
    return float((got.double() - ref).norm()) / max(float(ref.norm()), floor)


def available(backend: AttentionBackend, call: AttentionCall) -> AttentionCall:
    """Return the call, or only its forward if the backend has no backward; skip the test if it supports neither."""
    reason = backend.refusal(call)
    if reason and call.needs_backward:
        call = replace(call, needs_backward=False)
        reason = backend.refusal(call) and reason
    if reason:
        pytest.skip(reason)
    return call
