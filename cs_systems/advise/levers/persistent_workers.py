"""Workers of a DataLoader that persist, instead of being started again for each epoch or each iter(loader)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cs_systems.advise.edits import Edit, all_calls, chained, in_calls
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._loaders import NAMES, WAITS, has_workers, made_with, number_of
from cs_systems.analysis.comparison.loop_findings import ITERATORS

KEYWORD = "persistent_workers"
LINE = f"DataLoader(…, {KEYWORD}=True)"


def unfit(situation: Situation) -> str | None:
    if KEYWORD in situation.source:
        return "the script sets it itself"
    if not any(map(has_workers, all_calls(situation.source, NAMES))):
        return "the script has no workers"
    if situation.record and not ITERATORS.of(situation.record.results):
        return "no timed step starts the workers again"
    return None


def hook() -> Callable[[], bool]:
    def persist(keywords: dict[str, Any]) -> str:
        if not keywords.get("num_workers") or KEYWORD in keywords:
            return ""
        keywords[KEYWORD] = True
        return LINE

    return made_with(persist)


def patch(source: str) -> str | None:
    """Return the text with the keyword at each loader with workers; loaders with 0 workers refuse it."""
    numbers = {number for call in all_calls(source, NAMES) if has_workers(call) and (number := number_of(call))}
    return chained(*(_at_loaders_with(number) for number in sorted(numbers)))(source)


def _at_loaders_with(number: str) -> Edit:
    shown = number if re.fullmatch(r"[\w.()\[\]]+", number) else f"({number})"
    value = "True" if number.isdigit() else f"{shown} > 0"
    return in_calls(NAMES, {KEYWORD: value}, where=lambda call: has_workers(call) and number_of(call) == number)


LEVER = Lever(
    "random changes of samples continue from the last epoch's random state",
    None,
    LINE,
    0.05,
    ScriptChange("workers of the DataLoader that persist", unfit, hook=hook, patch=patch),
    remedies=(WAITS,),
    shortens_input=True,
)
