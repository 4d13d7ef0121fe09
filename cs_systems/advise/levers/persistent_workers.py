"""Workers of a DataLoader that persist, instead of being started again for each epoch or each iter(loader)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cs_systems.advise.edits import all_calls, in_calls
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._loaders import NAMES, WAITS, has_workers, made_with

KEYWORD = "persistent_workers"


def unfit(situation: Situation) -> str | None:
    if KEYWORD in situation.source:
        return "the script sets it itself"
    return None if any(map(has_workers, all_calls(situation.source, NAMES))) else "the script has no workers"


def hook() -> Callable[[], bool]:
    def persist(keywords: dict[str, Any]) -> bool:
        if not keywords.get("num_workers") or KEYWORD in keywords:
            return False
        keywords[KEYWORD] = True
        return True

    return made_with(persist)


LEVER = Lever(
    "random changes of samples continue from the last epoch's random state",
    None,
    "DataLoader(…, persistent_workers=True)",
    0.05,
    ScriptChange(
        "workers of the DataLoader that persist",
        unfit,
        hook=hook,
        patch=in_calls(NAMES, {KEYWORD: "True"}, where=has_workers),
    ),
    remedies=(WAITS,),
)
