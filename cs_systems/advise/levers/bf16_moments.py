"""Moments of AdamW in bf16 beside master weights: fewer bytes in the update and in memory."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation


def options(situation: Situation) -> Sequence[Option] | str:
    if situation.config.optimizer != "adamw_master":
        return "it follows bf16 weights with master weights"
    fields = {"optimizer": "adamw_bf16_state"}
    return [Option(fields, situation.forecast(**fields) if situation.goal == "memory" else None)]


LEVER = Lever(
    "rounds the moments of the optimizer to 8 bits",
    options,
    'MasterAdamW(model.bfloat16().parameters(), moments=MOMENTS["adamw_bf16_state"])',
    0.03,
    remedies=("optimizer-state",),
)
