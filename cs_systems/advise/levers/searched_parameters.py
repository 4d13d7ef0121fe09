"""No search for unused parameters: ranks do not walk the graph of each step before its backward pass."""

from __future__ import annotations

from cs_systems.advise.edits import with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers import _ddp

KEYWORD = "find_unused_parameters"
PATCH = with_value(KEYWORD, True, "False")


def unfit(situation: Situation) -> str | None:
    return _ddp.unfit(situation) or (None if PATCH(situation.source) else f"the script has no {KEYWORD}=True")


LEVER = Lever(
    "",
    None,
    "DistributedDataParallel(model)",
    0.05,
    ScriptChange("no search for unused parameters", unfit, hook=_ddp.made_with(**{KEYWORD: False}), patch=PATCH),
    remedies=("unused-parameters",),
)
