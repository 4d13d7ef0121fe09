"""Garbage collection less often, and never for objects that exist before the loop."""

from __future__ import annotations

import gc
import re

from cs_systems.advise.edits import after_imports
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.core.statistics import MINIMUM_EFFECT

THRESHOLD = (50_000, 20, 100)
LINES = ("gc.freeze()", f"gc.set_threshold{THRESHOLD}")


def unfit(situation: Situation) -> str | None:
    if re.search(r"\bgc\.", situation.source):
        return "the script controls it itself"
    share = situation.collected_share
    return None if share is None or share >= MINIMUM_EFFECT else f"collections take {share:.1%} of the steps"


def hook() -> None:
    gc.freeze()
    gc.set_threshold(*THRESHOLD)


LEVER = Lever(
    "",
    None,
    "; ".join(LINES),
    0.02,
    ScriptChange(
        "fewer garbage collections", unfit, hook=hook, patch=after_imports(*LINES, needs="gc"), in_script_alone=True
    ),
    remedies=("garbage-collection",),
    shortens_input=True,
)
