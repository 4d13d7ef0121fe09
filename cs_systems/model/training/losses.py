"""Losses of the training step, by name: cross-entropy, and a user's own, `path.py:name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.core.validation import shown

KIND = "training.losses"
FORM = "a function (logits, targets) that returns a scalar, as torch.nn.functional.cross_entropy"


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of `targets` (B, S) under `logits` (B, S, V).

    The result is a scalar in the dtype of the logits or wider.
    """
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def loss_function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of that name, called like `cross_entropy`.

    A user's own loss gets logits (N, V) and targets (N,), N = B S.

    Raises:
        ConfigError: it does not accept these arguments, or it returns no scalar when called.
    """
    if not plugins.is_foreign(name):
        return cross_entropy
    made = plugins.own_function(KIND, name, "logits, targets", FORM)

    def own(logits: Tensor, targets: Tensor) -> Tensor:
        loss: Any = made(logits.flatten(0, -2), targets.flatten())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
            raise ConfigError(f"loss {name} returned {found}; return a scalar tensor, such as the mean over all tokens")
        return loss

    return own
