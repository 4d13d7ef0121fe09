"""Names of changes, such as `host:augment=0`, and the table of step durations expected after each.

A profiled record keeps this table for the changes that its diagnoses ask for, since the trace may be gone when they are
made again: `together` makes it, and `Recalled` answers from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, NamedTuple, Protocol, TypedDict

from cs_systems.analysis.replay import (
    Change,
    Clean,
    CopiesOverlapped,
    Expected,
    FamilyScaled,
    HostScaled,
    InputRemoved,
    LaunchesFree,
    Refusal,
    Replay,
    SyncRemoved,
)
from cs_systems.analysis.replay.ranks import Together
from cs_systems.config import ConfigError
from cs_systems.core.tables import Column, table
from cs_systems.core.units import counted

FREE, OVERLAPPED = "free", "overlapped"
MEASURE = "other kernels would run, and a trace does not hold how long they take; measure it"
# Changes that no trace of the unchanged program can tell.
UNTELLABLE = {
    "precision": f"a change of precision cannot be told from a trace: {MEASURE}",
    "fusion": f"fusing kernels cannot be told from a trace: {MEASURE}",
    "compile": f"compiling cannot be told from a trace: {MEASURE}",
}


class WhatIfRow(TypedDict):
    """Duration of a step that is expected after one change, or several; None where it is refused."""

    what_if: Annotated[str, Column("what if", beside=60)]
    recorded_s: Annotated[float, Column("recorded")]
    replayed_s: Annotated[float | None, Column("replayed", drop=2)]
    unprofiled_s: Annotated[float | None, Column("unprofiled")]  # measured, or an estimate
    expected_s: Annotated[float | None, Column("expected")]
    low_s: Annotated[float | None, Column("low", drop=1)]
    high_s: Annotated[float | None, Column("high", drop=1)]
    saved_share: Annotated[float | None, Column("saved")]


class Form(NamedTuple):
    """Form of a change on the command line."""

    usage: str
    takes_name: bool  # after a colon
    needs_name: bool
    values: str | None  # the only value; None for a factor
    change: Callable[[str | None, float], Change]


FORMS = {
    "launches": Form("launches=free", False, False, FREE, lambda name, factor: LaunchesFree()),
    "host": Form("host=FACTOR or host:RANGE=FACTOR", True, False, None, lambda name, factor: HostScaled(factor, name)),
    "input": Form("input=0", False, False, "0", lambda name, factor: InputRemoved()),
    "sync": Form("sync=0 or sync:RANGE=0", True, False, "0", lambda name, factor: SyncRemoved(name)),
    "copies": Form("copies=overlapped", False, False, OVERLAPPED, lambda name, factor: CopiesOverlapped()),
    "family": Form(
        "family:NAME=FACTOR", True, True, None, lambda name, factor: FamilyScaled(name or "", factor)
    ),
}  # fmt: skip
STRAGGLER = "straggler=median"  # change of the ranks of a job
USAGE = "; ".join([*(form.usage for form in FORMS.values()), f"{STRAGGLER} for the traces of all ranks"])


def change(text: str) -> Change:
    """Return the change that a text names, such as `family:matmul=0.5`.

    Raises:
        ConfigError: The change is unknown, or no trace can tell it.
    """
    if text == STRAGGLER:
        raise ConfigError(f"--what-if {text} compares ranks; give the traces of all ranks of a job")
    left, equals, value = text.partition("=")
    kind, colon, name = left.partition(":")
    if reason := UNTELLABLE.get(kind):
        raise ConfigError(f"--what-if {text}: {reason}")
    form = FORMS.get(kind)
    if form is None or not equals or (colon and not form.takes_name) or (form.needs_name and not name):
        known = form.usage if form else USAGE
        raise ConfigError(f"unknown change --what-if {text!r}; write {known}")
    if form.values is not None:
        if value != form.values:
            raise ConfigError(f"--what-if {text} is not possible; write {form.usage}")
        return form.change(name or None, math.nan)  # the change has no factor
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ConfigError(f"--what-if {text}: {value!r} is not a factor; write a number from 0, such as 0.5")
    return form.change(name or None, factor)


Answers = Mapping[str, Expected | Refusal]  # change, as it was written → its answer


@table("what if: duration of a step after a change", name="what_if")
def what_if(replay: Replay, answers: Answers) -> list[WhatIfRow]:
    """Return one row per change."""
    replayed_s = replay.replayed_step_s if replay.parts else None
    return [_row(name, replay.step_s, replayed_s, answer) for name, answer in answers.items()]


def of_ranks(joint: Together | Refusal, texts: Sequence[str]) -> tuple[list[WhatIfRow], list[str]]:
    """Return (rows, notes) of what the step of a job would take after changes of its ranks.

    Raises:
        ConfigError: A change is not one of ranks.
    """
    for text in texts:
        if text != STRAGGLER:
            raise ConfigError(f"--what-if {text} replays one trace; give one file, or of several ranks {STRAGGLER}")
    if isinstance(joint, Refusal):
        return [], [f"no change is predicted: {joint.reason}"]
    answer = joint.straggler_like_the_median()
    notes = [f"{STRAGGLER}: {answer.reason}"] if isinstance(answer, Refusal) else [*answer.notes]
    gate = f"replayed {counted(len(joint.parts), 'rank')} together, by {counted(len(joint.transfer_s), 'collective')}"
    return [_row(STRAGGLER, joint.step_s, joint.replayed_s, answer)], [gate, *notes]


class Answering(Protocol):
    """Replay, or its stored answers: predicts the duration of a step after changes."""

    @property
    def step_s(self) -> float:
        """Duration of a step as recorded."""

    def what_if(self, *changes: Change) -> Expected | Refusal: ...


@dataclass(frozen=True)
class Cleanly:
    """Replay of recorded steps that predicts changes of the step without the profiler's slowdown."""

    replay: Replay
    clean: Clean

    @property
    def step_s(self) -> float:
        return self.replay.step_s

    def what_if(self, *changes: Change) -> Expected | Refusal:
        return self.replay.what_if(*changes, clean=self.clean)


@dataclass(frozen=True)
class Recalled:
    """Answers of a replay that were kept: the rows of `what_if` in a record."""

    rows: Sequence[WhatIfRow]

    @property
    def step_s(self) -> float:
        return self.rows[0]["recorded_s"]

    def what_if(self, *changes: Change) -> Expected | Refusal:
        name = _together(changes)
        row = next((row for row in self.rows if row["what_if"] == name), None)
        if row is None or row["expected_s"] is None or row["low_s"] is None or row["high_s"] is None:
            return Refusal("it was not told when the step was recorded", row["saved_share"] if row else None)
        now_s = row["recorded_s"] if row["unprofiled_s"] is None else row["unprofiled_s"]
        return Expected(row["expected_s"], row["low_s"], row["high_s"], now_s)


def together(replay: Answering, changes: Iterable[Change], worth: float = 0.0) -> list[WhatIfRow]:
    """Return a row for each change, and for all combinations of those that save this share of the step or more.

    Free launches come last, since they leave no host time to a change of it.
    """
    ordered = sorted(changes, key=lambda change: isinstance(change, LaunchesFree))
    alone = {change: replay.what_if(change) for change in ordered}
    told = [change for change, answer in alone.items() if isinstance(answer, Expected) and answer.share >= worth]
    sets = [chosen for size in range(2, len(told) + 1) for chosen in combinations(told, size)]
    answers = {(change,): answer for change, answer in alone.items()} | {each: replay.what_if(*each) for each in sets}
    return [
        {
            **_row(_together(each), replay.step_s, None, answer),
            "saved_share": answer.share,
        }  # also of one that is refused
        for each, answer in answers.items()
    ]


def _together(changes: Iterable[Change]) -> str:
    return " + ".join(sorted(map(str, changes)))


def _row(name: str, recorded_s: float, replayed_s: float | None, answer: Expected | Refusal) -> WhatIfRow:
    told = None if isinstance(answer, Refusal) else answer
    return {
        "what_if": name,
        "recorded_s": recorded_s,
        "replayed_s": replayed_s,
        "unprofiled_s": told.now if told and told.now != recorded_s else None,
        "expected_s": told.value if told else None,
        "low_s": told.low if told else None,
        "high_s": told.high if told else None,
        "saved_share": told.share if told else None,
    }


def notes(replay: Replay, answers: Answers) -> list[str]:
    """Return the outcome of the gate, why changes are refused, and what the numbers rest on."""
    if replay.why_not:
        return [f"no change is predicted: {replay.why_not}"]
    gate = (
        f"replayed {counted(len(replay.steps), 'step')}: off by {replay.error:.2%}, {replay.unexplained:.2%} of the "
        "time is unexplained; changes are predicted"
    )
    refused = [f"{name}: {answer.reason}" for name, answer in answers.items() if isinstance(answer, Refusal)]
    told = [note for answer in answers.values() if not isinstance(answer, Refusal) for note in answer.notes]
    return [gate, *dict.fromkeys(told), *refused]
