"""Fused optimizer: one kernel updates many parameters."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

from cs_systems.advise.edits import all_calls, in_calls
from cs_systems.advise.lever import Changes, Lever, Option, ScriptChange, Situation
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
    made = all_calls(situation.source, FUSED)
    if not made:
        return f"the script makes no {', '.join(FUSED)}"
    others = [{each.arg: ast.unparse(each.value) for each in call.keywords if each.arg in OTHERS} for call in made]
    if all(others):
        given = dict.fromkeys(f"{name}={value}" for keywords in others for name, value in keywords.items())
        return f"the script sets {' and '.join(given)} itself"
    return None if situation.goal == "memory" else situation.too_short(Phase.OPTIMIZER, what="the optimizer")


def hook() -> Callable[[], bool]:
    import torch

    changes = Changes()
    for name in FUSED:
        _fuse(getattr(torch.optim, name), changes)
    return changes


def _fuse(cls: Any, changes: Changes) -> None:
    """Make fused=True the default of an optimizer of torch, unless another form of the update is requested."""
    made = cls.__init__

    @functools.wraps(made)
    def fused(self: Any, *args: Any, **kwargs: Any) -> None:
        if not {"fused", *OTHERS} & kwargs.keys():
            kwargs["fused"] = True
            changes.made += 1
        elif "fused" not in kwargs:
            given = " and ".join(f"{name}={kwargs[name]}" for name in OTHERS if name in kwargs)
            changes.why = f"its {cls.__name__} is made with {given}"
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
