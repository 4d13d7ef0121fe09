"""Figure of every step in order, warm-up included, with the causes of slow steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING

from cs_systems.core import units
from cs_systems.record import RunRecord, Sample
from cs_systems.report.figures.drawing import COLORS, GREY, MARKERS, MOST_CURVES, one_panel, with_legend
from cs_systems.report.figures.labels import labels
from cs_systems.report.frame import STEP
from cs_systems.report.tables.records import varying

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SLOW = 1.2  # a warm-up step this many times slower than usual is labelled with its cause
LOW_CLOCK = 0.95  # of the highest clock seen


def warmup(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw every step in order, warm-up included; the slowest at each position is labelled with its causes."""
    measured = [r for r in records if r.is_timing and r.measurement and r.measurement.timed][:MOST_CURVES]
    names = dict(zip(data["record"], labels(data, varying(data)[0]), strict=True))
    drawn, axes = one_panel(4.2)
    slowest: dict[int, tuple[float, Sample, float | None]] = {}
    for record, color, marker in zip(measured, cycle(COLORS), cycle(MARKERS)):
        assert record.measurement
        taken = record.measurement.samples
        usual = median(record.measurement.durations_s(STEP)) or math.nan
        clock = max((s.sm_clock_hz for s in taken if s.sm_clock_hz), default=None)
        ratios = [s.wall_s / usual for s in taken]
        label = names[records.index(record)]
        numbers = range(1, len(taken) + 1)
        axes.plot(numbers, ratios, color=color, marker=marker, markersize=4, linewidth=1.2, label=label)
        for number, ratio, sample in zip(numbers, ratios, taken, strict=True):
            if ratio > max(SLOW, slowest.get(number, (0.0,))[0]):
                slowest[number] = (ratio, sample, clock)
    previous = ""
    for number, (ratio, sample, clock) in sorted(slowest.items()):
        cause = ", ".join(causes(sample, clock)) or "cause not recorded"
        if cause != previous:
            axes.annotate(cause, (number, ratio), (8, 0), textcoords="offset points", va="center", fontsize=9)
        previous = cause
    warm = max(sum(s.warmup for s in r.measurement.samples) for r in measured if r.measurement)
    axes.axvspan(0.5, warm + 0.5, color=GREY, alpha=0.12, linewidth=0, label="warm-up, not counted")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_ylabel("step time / median of the timed steps")
    axes.set_xlabel("step")
    axes.set_xlim(left=0.5)
    return with_legend(drawn, axes)


def causes(sample: Sample, highest_clock_hz: float | None) -> list[str]:
    """Return the recorded causes of a slow step; empty if none were recorded."""
    found = []
    if sample.compiles or sample.compile_s:
        spent = f" {units.human(sample.compile_s, 's')}" if sample.compile_s else ""
        found.append(f"compiling{spent}")
    if sample.device_mallocs:
        found.append(f"{sample.device_mallocs} cudaMalloc")
    if sample.sm_clock_hz and highest_clock_hz and sample.sm_clock_hz < LOW_CLOCK * highest_clock_hz:
        found.append(f"clock at {units.human(sample.sm_clock_hz, 'hz')}")
    return found
