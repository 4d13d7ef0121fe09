"""Shapes as variables in compiled code: a batch of another length does not compile the model again."""

from __future__ import annotations

import functools
from typing import Any

from cs_systems.advise.edits import chained, in_calls, with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation

CAUSE, COMPILE = "recompilation", "torch.compile"
REPEATS_NOTHING = "nothing is compiled again in the recorded steps"


def unfit(situation: Situation) -> str | None:
    if COMPILE not in situation.source:
        return "the script compiles no model"
    if situation.history and CAUSE not in situation.causes:
        return REPEATS_NOTHING
    return None


def hook() -> None:
    import torch

    compiled = torch.compile

    @functools.wraps(compiled)
    def dynamic(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs | {"dynamic": True})

    torch.compile = dynamic


LEVER = Lever(
    "sums in another order inside of fused kernels",
    None,
    "torch.compile(model, dynamic=True)",
    0.1,
    ScriptChange(
        "dynamic shapes in torch.compile",
        unfit,
        hook=hook,
        patch=chained(with_value("dynamic", False, "True", (COMPILE,)), in_calls((COMPILE,), {"dynamic": "True"})),
    ),
    remedies=(CAUSE,),
)
