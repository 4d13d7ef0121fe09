"""Two to four times as many workers of a DataLoader, where the step waits for those that it has."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from cs_systems.advise.edits import all_calls, valued
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._loaders import NAMES, WAITS, has_workers, made_with, unfit_stream
from cs_systems.machine.cores import usable_cores

LEAST, MOST = 2, 4  # times as many workers: more than twice as many only where the loop keeps a core of its own
KEYWORD = "num_workers"


def unfit(situation: Situation) -> str | None:
    if not any(map(has_workers, all_calls(situation.source, NAMES))):
        return "the script has no workers"
    if reason := unfit_stream(situation):
        return reason
    if situation.has_ranks:
        return "the ranks share the cores; give each more workers yourself"
    return "the step does not wait for data" if situation.history and WAITS not in situation.causes else None


def more_than(number: int) -> int:
    return max(LEAST * number, min(MOST * number, usable_cores() - 1))


def hook() -> Callable[[], bool]:
    def more(keywords: dict[str, Any]) -> str:
        number = keywords.get(KEYWORD)
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            return ""
        keywords[KEYWORD] = more_than(number)
        return f"DataLoader(…, {KEYWORD}={keywords[KEYWORD]})  # {number} now"

    return made_with(more)


def text_of(value: ast.expr) -> str | None:
    """Return the larger number of workers, where the script has a number."""
    match value:
        case ast.Constant(value=int(number)) if number > 0 and not isinstance(number, bool):
            return str(more_than(number))
    return None


LEVER = Lever(
    "random changes of samples draw from the workers' seeds",
    None,
    f"DataLoader(…, num_workers=max({LEAST} * n, min({MOST} * n, {usable_cores() - 1})))  # n: their number now",
    0.05,
    ScriptChange(f"{LEAST} to {MOST} times as many workers", unfit, hook=hook, patch=valued(KEYWORD, text_of, NAMES)),
    remedies=(WAITS,),
    shortens_input=True,
)
