"""Answer of a search by advise, as its folder keeps it: the waterfall of kept levers, and the options not kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypedDict, cast

from cs_systems.config import ConfigError
from cs_systems.core.tables import Column, Table
from cs_systems.core.validation import is_number
from cs_systems.record import RAN, Ran, RunRecord, records_path
from cs_systems.report.reading import some_records

REPLACED = "replaced"  # status of a lever that was kept, until another one took its place
STEPS = ("kept", REPLACED)
FILE = "advice.json"
START = "start"
_PROCESS = re.compile(r"(?P<levers>.+?)(?P<patched>-patched)?(-seed\d+)?-\d+")


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
OF_DRIFT = "steps are of different minutes; each gain was measured side by side"
NOTE = "gain: before over after, in fresh processes; low, high: 95% interval over all looks"
WATERFALL = {
    "time": Table("waterfall", TrialRow, CAPTION, _OF_TIME, notes=(NOTE,)),
    "memory": Table("waterfall", TrialRow, CAPTION, _OF_MEMORY),
    "energy": Table("waterfall", TrialRow, CAPTION, _OF_ENERGY, notes=(NOTE,)),
    "tokens-per-joule": Table("waterfall", TrialRow, CAPTION, _OF_TOKENS, notes=(NOTE,)),
}
APART = 0.05  # least relative difference of two steps from their gain that needs a word
_REDUCED = {"time": "step_s", "energy": "step_j"}  # goal → column that gains divide, if they have an interval


def waterfall_table(goal: str, rows: Sequence[TrialRow]) -> Table[TrialRow]:
    """Return the table of the kept levers; a note explains steps that contradict the gains."""
    table = WATERFALL[goal]
    return replace(table, notes=(*table.notes, OF_DRIFT)) if _contradict(goal, rows) else table


def _contradict(goal: str, rows: Sequence[TrialRow]) -> bool:
    """Return whether a step and the one above it are far from the gain, and outside of its interval.

    The steps are of single processes at different times, in which the machine may have become faster or slower. A gain
    of a larger batch is per token, so its step says nothing.
    """
    column = _REDUCED.get(goal)
    for before, after in pairwise(rows):
        was, now = (row[column] if column else None for row in (before, after))  # type: ignore[literal-required]
        gain, low, high = after["gain"], after["gain_low"], after["gain_high"]
        if not (was and now and gain and low and high) or "batch_size" in after["lever"]:
            continue
        if not low <= was / now <= high and abs(was / now / gain - 1) > APART:
            return True
    return False


OTHERS = Table("not_kept", TrialRow, "not kept", "change step_s reason")


class ToTryRow(TypedDict):
    """Option of a lever that applies to the start, before anything is measured."""

    lever: str
    change: str


TO_TRY = Table("to_try", ToTryRow, "options that apply to the start, the most promising first")


class ProcessRow(TypedDict):
    """Processes of a script with the same levers; their steps are of different minutes."""

    levers: Annotated[str, Column(wraps=True)]
    processes: int
    step_s: Annotated[float, Column("step")]
    fastest_s: Annotated[float, Column("fastest")]
    slowest_s: Annotated[float, Column("slowest")]


PROCESSES = Table(
    "processes",
    ProcessRow,
    "median step of the processes with each set of levers",
    notes=("steps of different minutes; gains are measured side by side",),
)


@dataclass(frozen=True)
class Advice:
    """Answer of a search.

    Attributes:
        goal: a key of WATERFALL.
        sentences: the result in words.
        waterfall: the start, and below it each kept lever; empty if none was kept.
        others: the options that were not kept, with the reason.
        best: the levers of a script's best step, as its records name them; None for cells.
    """

    goal: str
    sentences: tuple[str, ...]
    waterfall: tuple[TrialRow, ...]
    others: tuple[TrialRow, ...]
    best: str | None = None

    @property
    def tables(self) -> list[tuple[Table[TrialRow], tuple[TrialRow, ...]]]:
        """Tables that have rows: the kept levers, then the other options."""
        return [
            (table, rows)
            for table, rows in ((waterfall_table(self.goal, self.waterfall), self.waterfall), (OTHERS, self.others))
            if rows
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
        best = data.get("best") or {}
        levers = named(tuple(map(_text, best["levers"]))) if "levers" in best else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not the answer of cs-systems advise ({error!r:.100}); delete it") from None
    return Advice(goal, sentences, waterfall, others, levers)


def named(levers: Iterable[str]) -> str:
    """Return the levers of a script's process as one name."""
    return "+".join(levers) or START


def folder_name(levers: Iterable[str], number: int, seed: int = 0, *, is_patched: bool = False) -> str:
    """Return the name of the folder of a script's process; `records_of_script` reads it."""
    return "-".join([named(levers), *(["patched"] * is_patched), *([f"seed{seed}"] * bool(seed)), str(number)])


def records_of_script(folder: Path) -> tuple[list[RunRecord], list[str]]:
    """Return the records of the processes of a script, the start's first, and warnings about skipped lines.

    Each says which levers it ran with, which its folder's name tells, and is one of their repeats.
    """
    found, complaints = list[RunRecord](), list[str]()
    for file in folder.glob(f"*/{records_path(folder).name}"):
        if match := _PROCESS.fullmatch(file.parent.name):
            levers = match["levers"] + (" as a diff" if match["patched"] else "")
            records, lines = some_records(file.parent)
            found += [_with_levers(record, levers) for record in records]
            complaints += lines
    counts = Counter[str | None]()
    for place, record in enumerate(found := sorted(found, key=_order)):
        found[place] = replace(record, repeat=counts[levers_of(record)])
        counts[levers_of(record)] += 1
    return found, complaints


def _with_levers(record: RunRecord, levers: str) -> RunRecord:
    ran = {**RAN.first_or_empty(record.results), "levers": levers}
    return replace(record, results={**record.results, **RAN.filled([cast(Ran, ran)])})


def _order(record: RunRecord) -> tuple[bool, float]:
    return levers_of(record) != START, record.origin.recorded_unix_s if record.origin else 0.0


def levers_of(record: RunRecord) -> str | None:
    """Return the levers that a process of a script ran with; None for any other record."""
    return RAN.first_or_empty(record.results).get("levers")


def processes(records: Iterable[RunRecord]) -> list[ProcessRow]:
    """Return a row for each set of levers, in the order of the records."""
    steps: dict[str, list[float]] = {}
    for record in records:
        levers, step_s = levers_of(record), record.measurement and record.measurement.median_s("step")
        if levers is not None and step_s:
            steps.setdefault(levers, []).append(step_s)
    return [
        {
            "levers": levers.replace("+", " + "),
            "processes": len(of_one),
            "step_s": median(of_one),
            "fastest_s": min(of_one),
            "slowest_s": max(of_one),
        }
        for levers, of_one in steps.items()
    ]


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
