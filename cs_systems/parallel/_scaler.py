"""The gradient scaler of fp16 where each rank has parts of the gradients: the ranks agree on what overflowed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class PartsScaler(torch.amp.GradScaler):
    """A step whose gradients overflowed on one rank is skipped on all. Takes every optimizer that a strategy makes.

    torch's ShardedGradScaler asks the other ranks only where it unscales by itself: an optimizer that does so in its
    own kernel, as torch's fused ones, would skip on one rank alone. And it adds the ranks' answers up, of which that
    kernel takes 1 alone as yes.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Where the model's parameters have no gradients, of the parts that have them. A rank may have none at all."""
        of_parts = getattr(optimizer, "of_parts", optimizer)
        found = super()._unscale_grads_(of_parts, inv_scale, found_inf, allow_fp16=True)
        found = found or {found_inf.device: found_inf}
        for overflowed in found.values():
            dist.all_reduce(overflowed, dist.ReduceOp.MAX)
        return found
