"""Strategy of one process that trains alone, as the baseline of every comparison. It sends nothing."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from cs_systems.config import ConfigError
from cs_systems.model.parallel import ParallelStrategy


def wrap(model: nn.Module) -> nn.Module:
    """Return the model unchanged. Raises ConfigError for several processes, which would not train together."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"strategy single trains on one process, but {dist.get_world_size()} were started; "
            "start one process, or use a strategy such as ddp_bucketed"
        )
    return model


STRATEGY = ParallelStrategy(splits=frozenset(), wrap=wrap, sent_bytes=lambda payload, ranks: 0)
