"""Table of experiments: the time of a step after a change that the tool made itself, and the time without it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from cs_systems.core.tables import Column, Table

DEFAULT_S = 10.0  # seconds for all experiments of a command or a Recorder together


class ExperimentRow(TypedDict):
    """One experiment; all times are None if it was skipped."""

    experiment: str  # name of its file, with dashes
    instead: Annotated[str, Column("with")]  # the variant, such as a precision or kernel; "" if there is only one
    of: str  # what both times measure: the step, or a part of it
    time_s: Annotated[float | None, Column("then")]
    low_s: float | None
    high_s: float | None
    baseline_s: Annotated[float | None, Column("now")]
    rounds: int | None
    spent_s: Annotated[float | None, Column("cost")]
    stands_for: Annotated[str, Column("stands for")]
    skipped: Annotated[str | None, Column("skipped because")]


EXPERIMENTS = Table(
    "experiments",
    ExperimentRow,
    "experiments after the last recorded step",
    "experiment instead of baseline_s time_s low_s high_s stands_for skipped",
)


def skipped(experiment: str, reason: str) -> ExperimentRow:
    """Return the row of an experiment that was not made."""
    return {
        "experiment": experiment,
        "instead": "",
        "of": "",
        "time_s": None,
        "low_s": None,
        "high_s": None,
        "baseline_s": None,
        "rounds": None,
        "spent_s": None,
        "stands_for": "",
        "skipped": reason,
    }
