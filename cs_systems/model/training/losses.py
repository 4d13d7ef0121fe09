"""Loss of the training step."""

from __future__ import annotations

from torch import Tensor, nn


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of `targets` (B, S) under `logits` (B, S, V).

    The result is a scalar in the dtype of the logits or wider.
    """
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
