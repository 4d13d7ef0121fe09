"""Larger buckets of gradients: fewer all-reduces between ranks, each with its latency."""

from __future__ import annotations

from cs_systems.advise.lever import Lever, ScriptChange
from cs_systems.advise.levers import _ddp

OPTION = {"bucket_cap_mb": 100}  # four times PyTorch's default
LEVER = Lever(
    "sums of gradients over ranks in another order",
    None,
    "DistributedDataParallel(model, bucket_cap_mb=100)",
    0.03,
    ScriptChange(
        "gradients in buckets of 100 MiB",
        _ddp.unless_set("bucket_cap_mb"),
        hook=_ddp.made_with(**OPTION),
        patch=_ddp.patch(**OPTION),
    ),
    remedies=("small-buckets",),
)
