"""Promise that each step uses the same parameters in the same order, so that ranks look at the graph once."""

from __future__ import annotations

from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers import _ddp

OPTION = {"static_graph": True}


def unfit(situation: Situation) -> str | None:
    if _ddp.leaves_out_averages(situation):
        return "the script leaves out the average in some passes, so that the graph is not the same"
    if "no_sync" in getattr(situation.cell, "levers", ()):
        return "no_sync leaves out the average in some passes, so that the graph is not the same"
    return _ddp.unless_set("static_graph")(situation)


LEVER = Lever(
    "",
    None,
    "DistributedDataParallel(model, static_graph=True)",
    0.02,
    ScriptChange("the same graph in each step", unfit, hook=_ddp.made_with(**OPTION), patch=_ddp.patch(**OPTION)),
)
