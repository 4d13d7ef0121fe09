"""PyTorch's DistributedDataParallel with its own defaults, for comparison (Li et al. 2020).

Each rank sends 2 Ψ (N−1)/N bytes. By default it rejects a batch that leaves a parameter without a gradient; with
`find_unused_parameters=True` it accepts such a batch, and traverses the graph in each step.

It rebuilds its buckets in the second step. If steps are short, NCCL's process group still holds the old ones then, so
the memory exceeds the predicted peak by Ψ once.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cs_systems.formulas.communication import averaging_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._data_parallel import check_same_parameters


def wrap(
    model: nn.Module,
    bucket_size_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
    find_unused_parameters: bool = False,
) -> nn.Module:
    """Return the model in DistributedDataParallel.

    bucket_size_mb: torch's `bucket_cap_mb`; None is torch's default of 25 with a first bucket of 1.
    """
    check_same_parameters(model)
    size: dict[str, Any] = {} if bucket_size_mb is None else {"bucket_cap_mb": bucket_size_mb}
    return DistributedDataParallel(
        model,
        gradient_as_bucket_view=gradient_as_bucket_view,
        find_unused_parameters=find_unused_parameters,
        **size,
    )


STRATEGY = ParallelStrategy(
    overlaps=True,
    counted=False,
    wrap=wrap,
    sent_bytes=averaging_bytes,
    buckets=1.0,
    bucket_view="gradient_as_bucket_view",
    options={"bucket_size_mb": "size", "gradient_as_bucket_view": "flag", "find_unused_parameters": "flag"},
    for_unused={"find_unused_parameters": True},
    compared=5,
)
