"""Tensors that operations keep on CUDA, from runs on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cs_systems.instrument.like_cuda import like_cuda

BATCH, HEADS, LENGTH, D_HEAD = 2, 3, 64, 8


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["none", "fixed", "trained"])
def test_fused_attention_keeps_no_scores(mask: str, dropout: float) -> None:
    kept: list[Tensor] = []
    with FakeTensorMode(), like_cuda():
        query = torch.randn(BATCH, HEADS, LENGTH, D_HEAD, requires_grad=True)
        bias = None if mask == "none" else torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=mask == "trained")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            output = F.scaled_dot_product_attention(query, query, query, attn_mask=bias, dropout_p=dropout)
        output.sum().backward()
    assert max(t.numel() for t in kept if t is not bias and t.shape[0] == BATCH) == query.numel()
    if mask == "trained":
        assert bias is not None
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape
