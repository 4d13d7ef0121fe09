"""The gradient scaler of fp16 where each rank has parts of the gradients: the ranks agree on what overflowed.

Apart from the strategies, for it takes half a second to import.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class PartsScaler(ShardedGradScaler):
    """A step whose gradients overflowed on one rank is skipped on all. Takes every optimizer that a strategy makes."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Where the model's parameters have no gradients, of the parts that have them."""
        of_parts = getattr(optimizer, "of_parts", optimizer)
        return super()._unscale_grads_(of_parts, inv_scale, found_inf, allow_fp16)
