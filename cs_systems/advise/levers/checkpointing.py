"""Activation checkpointing: off where memory is free, which saves recomputation; on where memory is the goal."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.config import Mode


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if config.mode is Mode.FORWARD:
        return "forward alone keeps no activations"
    plans: tuple[str, ...]
    if situation.goal == "memory":
        plans = ("every:1", "selective:matmul")
    elif config.checkpoint == "none":
        return "nothing is recomputed"
    else:
        plans = ("none",)
    memory = {plan: situation.forecast(checkpoint=plan) for plan in plans if plan != config.checkpoint}
    if situation.goal == "memory":
        return [Option({"checkpoint": plan}, expected) for plan, expected in memory.items()]
    limit, needed = situation.memory_bytes, memory["none"]
    if limit and needed and needed.value > limit:
        return "without it the step does not fit into memory"
    return [Option({"checkpoint": "none"})]


LEVER = Lever(
    "",
    options,
    "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    0.2,
    remedies=("kept-activations", "recomputation", "out-of-memory"),
)
