"""Gradients as views of the buckets that ranks reduce: no copy into the bucket and back, and less memory."""

from __future__ import annotations

from cs_systems.advise.lever import Lever, ScriptChange
from cs_systems.advise.levers import _ddp

OPTION = {"gradient_as_bucket_view": True}
LEVER = Lever(
    "",
    None,
    "DistributedDataParallel(model, gradient_as_bucket_view=True)",
    0.03,
    ScriptChange(
        "gradients as views of the buckets",
        _ddp.unless_set("gradient_as_bucket_view"),
        hook=_ddp.made_with(**OPTION),
        patch=_ddp.patch(**OPTION),
    ),
    saves_memory=True,
)
