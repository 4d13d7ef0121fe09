"""Kinds of figures: KINDS maps each name to its title, the check of the records, and the function that draws it.

`plot` calls them and sets the style. A file is imported only when it draws, because the help of a command also lists
the kinds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cs_systems.config import Mode
from cs_systems.core.fields import Subject
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """Kind of figure.

    drawn_by: the function that draws it, as FILE.NAME; it takes the records, and with `of_frame` their frame too.

    `fits` checks the frame for the needed data; `table` is the results table that is drawn, if any.
    """

    title: str
    fits: Callable[[pd.DataFrame], bool]
    drawn_by: str
    table: str | None = None
    of_frame: bool = True

    def draw(self, records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
        file, name = self.drawn_by.split(".")
        function = getattr(importlib.import_module(f"cs_systems.report.figures.{file}"), name)
        drawn: Figure = function(records, data) if self.of_frame else function(records)
        return drawn


def _measured(data: pd.DataFrame) -> bool:
    return bool(data["median_s"].notna().any())


def _has_parts(data: pd.DataFrame) -> bool:
    """Return whether steps have several phases that are not also measured one by one."""
    from cs_systems.report.tables.columns import phases_of

    if data["workload"].iloc[0] == Subject.COLLECTIVE:  # the workload measures only one of the phases
        return False
    one_by_one = data["workload"].iloc[0] == Subject.ATTENTION and set(data["mode"]) != {Mode.FORWARD_BACKWARD}
    return not one_by_one and len(phases_of(data)) > 2


def _along(*columns: str) -> Callable[[pd.DataFrame], bool]:
    def fits(data: pd.DataFrame) -> bool:
        from cs_systems.report.figures.lengths import runs_along

        return all(runs_along(data, column) for column in columns)

    return fits


def _filled_by(workload: str) -> Callable[[pd.DataFrame], bool]:
    return lambda data: data["workload"].iloc[0] == workload and _measured(data)


KINDS = {
    "collectives": Kind(
        "time and bus bandwidth of a call", _filled_by(Subject.COLLECTIVE), "collectives.calls", of_frame=False
    ),
    "sums": Kind("error of a sum by its length", _filled_by("accumulation"), "errors.sums", of_frame=False),
    "steps": Kind("error of one step in low precision", _filled_by("normalization"), "errors.steps", of_frame=False),
    "curves": Kind("training loss", _filled_by(Subject.CURVE), "errors.curves", "training_curve", of_frame=False),
    "streams": Kind(
        "computation and communication in one step of rank 0",
        lambda data: True,
        "streams.streams",
        "streams",
        of_frame=False,
    ),
    "families": Kind("kernel time by family", lambda data: True, "bars.families", "families"),
    "phases": Kind("step time by phase", _has_parts, "bars.phases"),
    "rate": Kind(
        "model FLOP/s and the device's peak", _along("model_flops_per_s", "ceiling_flops_per_s"), "lengths.rate"
    ),
    "time": Kind("step time", _along("median_s"), "lengths.time"),
    "memory": Kind("peak memory", _along("peak_allocated_bytes"), "lengths.memory"),
    "warmup": Kind("every step, including warm-up", _measured, "warmup.warmup"),
}
