"""The training loss."""

from __future__ import annotations

from torch import Tensor, nn


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood of `targets` (B, S) under `logits` (B, S, V), a scalar in their dtype or wider."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
