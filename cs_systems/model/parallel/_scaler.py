"""Gradient scaler for fp16 if each rank has a share of the gradients; all ranks agree on the steps to skip."""

from __future__ import annotations

import torch
from torch import Tensor

from cs_systems.model.parallel._collectives import maximum


class PartsScaler(torch.amp.GradScaler):
    """Gradient scaler that skips a step on all ranks if one overflowed, for every optimizer that a strategy makes.

    torch's ShardedGradScaler asks the other ranks only if it unscales by itself. An optimizer that unscales in its own
    kernel, as torch's fused ones do, would skip on one rank only. ShardedGradScaler also sums the ranks' flags, but
    that kernel accepts only 1 as true.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients of this rank's parts if the model's parameters have no gradients.

        A rank may have no part at all.
        """
        of_parts = getattr(optimizer, "of_parts", optimizer)
        found = super()._unscale_grads_(of_parts, inv_scale, found_inf, allow_fp16=True)
        found = found or {found_inf.device: found_inf}
        for overflowed in found.values():
            maximum(overflowed).wait()
        return found
