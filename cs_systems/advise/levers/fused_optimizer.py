"""Fused optimizer: one kernel updates many parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from cs_systems.advise.edits import calls, in_calls
from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation
from cs_systems.config import Mode
from cs_systems.core import plugins
from cs_systems.core.optimizers import USUAL, optimizer
from cs_systems.core.phases import Phase


def options(situation: Situation) -> Sequence[Option] | str:
    name, known = situation.config.optimizer, optimizer(situation.config.optimizer)
    if situation.config.mode is not Mode.TRAIN_STEP:
        return "the step has no optimizer"
    if plugins.is_foreign(name):
        return f"optimizer {name} is your own"
    if known.has_master_weights:
        return f"optimizer {name} is one kernel already"
    if known.is_fused:
        return "the optimizer is fused already"
    return [Option({"optimizer": USUAL})]


FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
OTHERS = ("foreach", "capturable", "differentiable")


def unfit(situation: Situation) -> str | None:
    if "fused=" in situation.source:
        return "the script sets fused itself"
    if not calls(situation.source, FUSED):
        return f"the script makes no {', '.join(FUSED)}"
    return None if situation.goal == "memory" else situation.too_short(Phase.OPTIMIZER, what="the optimizer")


def hook() -> Callable[[], bool]:
    import torch

    fused: list[str] = []
    for name in FUSED:
        _fuse(getattr(torch.optim, name), fused)
    return lambda: bool(fused)


def _fuse(cls: Any, changed: list[str]) -> None:
    """Make fused=True the default of an optimizer of torch, unless another form of the update is requested."""
    made = cls.__init__

    @functools.wraps(made)
    def fused(self: Any, *args: Any, **kwargs: Any) -> None:
        if not {"fused", *OTHERS} & kwargs.keys():
            kwargs["fused"] = True
            changed.append(cls.__name__)
        made(self, *args, **kwargs)

    cls.__init__ = fused


LEVER = Lever(
    "the order of a few operations in the update",
    options,
    "torch.optim.AdamW(…, fused=True)",
    0.1,
    ScriptChange("fused=True for the optimizer", unfit, hook=hook, patch=in_calls(FUSED, {"fused": "True"}, OTHERS)),
    remedies=("unfused-optimizer", "foreach-temporaries"),
    saves_memory=True,
)
