"""Answer of a search by advise, as its folder keeps it: the waterfall of kept levers, and the options not kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from cs_systems.config import ConfigError
from cs_systems.core.tables import Column, Table
from cs_systems.core.validation import is_number

REPLACED = "replaced"  # status of a lever that was kept, until another one took its place
STEPS = ("kept", REPLACED)
FILE = "advice.json"


class TrialRow(TypedDict):
    """Option of a lever: the expected and the measured step or peak, and why it was kept or not.

    The gain is the best cell's step (or peak) over the option's; each is measured in processes of its own. The code
    carries out a lever of a script with the values of the trial; "" where the lever's own lines say all.
    """

    lever: str
    change: Annotated[str, Column(wraps=True)]
    status: str
    expected_s: Annotated[float | None, Column("expected")]
    step_s: Annotated[float | None, Column("step")]
    expected_bytes: Annotated[float | None, Column("expected peak", own_unit=True)]
    peak_bytes: Annotated[int | None, Column("peak", own_unit=True)]
    step_j: Annotated[float | None, Column("energy", own_unit=True)]
    tokens_per_j: Annotated[float | None, Column("tokens/J")]
    gain: Annotated[float | None, Column("gain")]
    gain_low: Annotated[float | None, Column("low", drop=2)]
    gain_high: Annotated[float | None, Column("high", drop=1)]
    processes: int
    took_s: float | None
    numbers: str
    code: str
    reason: str


_OF_TIME = "lever change expected_s step_s gain gain_low gain_high"
_OF_MEMORY = "lever change expected_bytes peak_bytes gain step_s"
_OF_ENERGY = "lever change step_j gain gain_low gain_high step_s"
_OF_TOKENS = "lever change tokens_per_j gain gain_low gain_high step_s"
CAPTION = "kept, each on top of those above it"
NOTE = "gain: before over after, in fresh processes; low, high: 95% interval over all looks"
WATERFALL = {
    "time": Table("waterfall", TrialRow, CAPTION, _OF_TIME, notes=(NOTE,)),
    "memory": Table("waterfall", TrialRow, CAPTION, _OF_MEMORY),
    "energy": Table("waterfall", TrialRow, CAPTION, _OF_ENERGY, notes=(NOTE,)),
    "tokens-per-joule": Table("waterfall", TrialRow, CAPTION, _OF_TOKENS, notes=(NOTE,)),
}
OTHERS = Table("not_kept", TrialRow, "not kept", "change step_s reason")


class ToTryRow(TypedDict):
    """Option of a lever that applies to the start, before anything is measured."""

    lever: str
    change: str


TO_TRY = Table("to_try", ToTryRow, "options that apply to the start, the most promising first")


@dataclass(frozen=True)
class Advice:
    """Answer of a search.

    Attributes:
        goal: a key of WATERFALL.
        sentences: the result in words.
        waterfall: the start, and below it each kept lever; empty if none was kept.
        others: the options that were not kept, with the reason.
    """

    goal: str
    sentences: tuple[str, ...]
    waterfall: tuple[TrialRow, ...]
    others: tuple[TrialRow, ...]

    @property
    def tables(self) -> list[tuple[Table[TrialRow], tuple[TrialRow, ...]]]:
        """Tables that have rows: the kept levers, then the other options."""
        return [
            (table, rows) for table, rows in ((WATERFALL[self.goal], self.waterfall), (OTHERS, self.others)) if rows
        ]


def read(folder: Path) -> Advice | None:
    """Return the answer that a search left in its folder, or None. Raises ConfigError for a file of another kind."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text())
        waterfall = tuple(map(_row, data["waterfall"]))
        others = tuple(_row(each) for each in data["trials"] if each["status"] not in STEPS and each["change"])
        goal, sentences = data["goal"], tuple(map(_text, data["sentences"]))
        if goal not in WATERFALL:
            raise ValueError(f"no goal is named {goal!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not the answer of cs-systems advise ({error!r:.100}); delete it") from None
    return Advice(goal, sentences, waterfall, others)


def _row(given: Mapping[str, Any]) -> TrialRow:
    """Return the columns of a row. Raises TypeError for a value of another type."""
    found = {}
    for name in TrialRow.__annotations__:
        value = given.get(name, "" if name == "code" else None)  # older answers have no code
        if name in _TEXTS:
            value = _text(value)
        elif value is not None and not is_number(value):
            raise TypeError(f"{name} is {value!r:.50}")
        found[name] = value
    return cast(TrialRow, found)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.50} is not text")
    return value


_TEXTS = ("lever", "change", "status", "numbers", "code", "reason")
