"""Optimizers by their names in config.OPTIMIZERS, both our own and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from cs_systems.model.training.adamw import AdamW as AdamW
from cs_systems.model.training.master_adamw import MOMENTS, MasterAdamW


def optimizer_class(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return (class, options) of the optimizer `name` of config.OPTIMIZERS.

    `default` is not accepted: the caller resolves it.
    """
    if name == "adamw":
        return AdamW, {}
    if name in MOMENTS:
        return MasterAdamW, {"moments": MOMENTS[name]}
    return torch.optim.AdamW, {"fused": name == "adamw_fused", "foreach": name == "adamw_foreach"}


def make_optimizer(name: str, params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer of that name for one process."""
    cls, own = optimizer_class(name)
    return cls(params, **own, **options)
