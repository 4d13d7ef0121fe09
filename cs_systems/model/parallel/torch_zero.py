"""PyTorch's ZeroRedundancyOptimizer, for comparison with `zero1` (Rajbhandari et al. 2020, P_os).

Each whole parameter has one owner, which broadcasts it: Ψ (N−1)/N bytes more than for averaging the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from cs_systems.formulas.communication import owners_bytes
from cs_systems.model.parallel import ParallelStrategy


def make_optimizer(params: Iterable[Any], cls: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it compiles torch's scripted optimizers

    return ZeroRedundancyOptimizer(list(params), optimizer_class=cls, **options)


STRATEGY = ParallelStrategy(
    splits=frozenset({"optimizer"}),
    counted=False,
    make_optimizer=make_optimizer,
    sent_bytes=owners_bytes,
    one_dtype=True,
)
