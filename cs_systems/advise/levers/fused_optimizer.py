"""Fused optimizer: one kernel updates many parameters."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.config import Mode, RunConfig
from cs_systems.core import plugins


def options(situation: Situation) -> Sequence[Option] | str:
    name = situation.config.optimizer
    if situation.config.mode is not Mode.TRAIN_STEP:
        return "the step has no optimizer"
    if name in (RunConfig.optimizer, "adamw_fused"):
        return "the optimizer is fused already"
    if plugins.is_foreign(name):
        return f"optimizer {name} is your own"
    if name not in ("adamw", "adamw_foreach"):
        return f"optimizer {name} is one kernel already"
    return [Option({"optimizer": "adamw_fused"})]


LEVER = Lever("the order of a few operations in the update", options, "torch.optim.AdamW(…, fused=True)", 0.1)
