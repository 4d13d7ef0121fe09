"""Gradients set to None instead of zero: no kernels that fill them, and the first gradient is not added to zeros."""

from __future__ import annotations

import functools
from typing import Any

from cs_systems.advise.edits import with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation

PATCH = with_value("set_to_none", False, "True", ("zero_grad",))


def unfit(situation: Situation) -> str | None:
    return None if PATCH(situation.source) else "gradients are set to None already"


def hook() -> None:
    import torch

    owners: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
    for owner in owners:
        owner.zero_grad = _to_none(owner.zero_grad)


def _to_none(function: Any) -> Any:
    @functools.wraps(function)
    def to_none(self: Any, set_to_none: bool = True) -> None:
        function(self, True)

    return to_none


LEVER = Lever(
    "parameters without a gradient are not updated",
    None,
    "optimizer.zero_grad()",
    0.03,
    ScriptChange("gradients set to None", unfit, hook=hook, patch=PATCH),
    saves_memory=True,
)
