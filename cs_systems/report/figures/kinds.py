"""Kinds of figures: KINDS maps each name to its title, the check of the records, and the function that draws it.

`plot` calls them and sets the style.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cs_systems.config import Mode
from cs_systems.core.fields import Subject
from cs_systems.record import RunRecord
from cs_systems.report.figures import bars, collectives, errors, lengths, streams, warmup
from cs_systems.report.tables import columns as cols

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """Kind of figure; `fits` checks the frame for what `draw` shows; `table` is the results table shown, if any."""

    title: str
    fits: Callable[[pd.DataFrame], bool]
    draw: Callable[[Sequence[RunRecord], pd.DataFrame], Figure]
    table: str | None = None


def _measured(data: pd.DataFrame) -> bool:
    return bool(data["median_s"].notna().any())


def _has_parts(data: pd.DataFrame) -> bool:
    """Return whether steps have several phases that are not also measured one by one."""
    if data["workload"].iloc[0] == Subject.COLLECTIVE:  # only one of the phases is measured
        return False
    one_by_one = data["workload"].iloc[0] == Subject.ATTENTION and set(data["mode"]) != {Mode.FORWARD_BACKWARD}
    return not one_by_one and len(cols.phases_of(data)) > 2


def _has_ceiling(data: pd.DataFrame) -> bool:
    return lengths.runs_along(data, "model_flops_per_s") and lengths.runs_along(data, "ceiling_flops_per_s")


def _filled_by(workload: str) -> Callable[[pd.DataFrame], bool]:
    return lambda data: data["workload"].iloc[0] == workload and _measured(data)


def _of(
    drawn_by: Callable[[Sequence[RunRecord]], Figure],
) -> Callable[[Sequence[RunRecord], pd.DataFrame], Figure]:
    """Adapt a figure that needs no frame to the signature of KINDS."""

    def draw(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
        return drawn_by(records)

    return draw


KINDS = {
    "collectives": Kind("time and bus bandwidth of a call", _filled_by(Subject.COLLECTIVE), _of(collectives.calls)),
    "sums": Kind("error of a sum by its length", _filled_by("accumulation"), _of(errors.sums)),
    "steps": Kind("error of one step in low precision", _filled_by("normalization"), _of(errors.steps)),
    "curves": Kind("training loss", _filled_by("training_curve"), _of(errors.curves), table="training_curve"),
    "streams": Kind(
        "computation and communication in one step of rank 0", lambda data: True, _of(streams.streams), table="streams"
    ),
    "families": Kind("kernel time by family", lambda data: True, bars.families, table="families"),
    "phases": Kind("step time by phase", _has_parts, bars.phases),
    "rate": Kind("model FLOP/s and the device's peak", _has_ceiling, lengths.rate),
    "time": Kind("step time", lambda data: lengths.runs_along(data, "median_s"), lengths.time),
    "memory": Kind("peak memory", lambda data: lengths.runs_along(data, "peak_allocated_bytes"), lengths.memory),
    "warmup": Kind("every step, including warm-up", _measured, warmup.warmup),
}
