"""Larger buckets of gradients: fewer all-reduces between ranks, each with its latency."""

from __future__ import annotations

import ast

from cs_systems.advise.edits import chained, valued
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers import _ddp

KEYWORD, SIZE_MB = "bucket_cap_mb", 100  # four times PyTorch's default
OPTION = {KEYWORD: SIZE_MB}


def unfit(situation: Situation) -> str | None:
    is_large = f"{KEYWORD}={SIZE_MB}" in situation.source
    return _ddp.unfit(situation) or ("the buckets are as large already" if is_large else None)


def text_of(value: ast.expr) -> str | None:
    """Return the larger size for another one that the script sets."""
    return None if isinstance(value, ast.Constant) and value.value == SIZE_MB else str(SIZE_MB)


LEVER = Lever(
    "sums of gradients over ranks in another order",
    None,
    f"DistributedDataParallel(model, {KEYWORD}={SIZE_MB})",
    0.03,
    ScriptChange(
        f"gradients in buckets of {SIZE_MB} MiB",
        unfit,
        hook=_ddp.made_with(**OPTION),
        patch=chained(valued(KEYWORD, text_of), _ddp.patch(**OPTION)),
    ),
    remedies=("small-buckets", "exposed-communication"),
)
