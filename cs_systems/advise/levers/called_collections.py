"""Garbage collections and emptied caches that the loop asks for, left out."""

from __future__ import annotations

import gc

from cs_systems.advise.edits import without_calls
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.core.statistics import MINIMUM_EFFECT

CALLS = ("gc.collect", "torch.cuda.empty_cache")


def unfit(situation: Situation) -> str | None:
    if not any(f"{call}(" in situation.source for call in CALLS):
        return f"the script calls no {CALLS[0]}()"
    if situation.record is None or situation.allocates:
        return None
    share = situation.collected_share or 0.0
    if share >= MINIMUM_EFFECT:
        return None
    return f"collections take {share:.1%} of the steps, and no timed step calls cudaMalloc"


def hook() -> None:
    import torch

    def collect_nothing(generation: int = 2) -> int:
        """Collect nothing, and so find no unreachable object."""
        return 0

    def keep_cache() -> None:
        """Keep the allocator's free blocks."""

    gc.collect, torch.cuda.empty_cache = collect_nothing, keep_cache


LEVER = Lever(
    "",
    None,
    "no gc.collect() and no torch.cuda.empty_cache() in the loop",
    0.2,
    ScriptChange("gc.collect() and empty_cache() left out", unfit, hook=hook, patch=without_calls(CALLS)),
    remedies=("garbage-collection", "device-allocation"),
    shortens_input=True,
)
