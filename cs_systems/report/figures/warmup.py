"""Figure of every step in order, warm-up included, with the causes of slow steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cs_systems.core import units
from cs_systems.record import RunRecord, Sample
from cs_systems.report.figures.drawing import (
    COLORS,
    CROWD,
    GREY,
    MARKERS,
    MOST_CURVES,
    log_scale,
    on_patch,
    one_panel,
    with_legend,
)
from cs_systems.report.figures.labels import labels
from cs_systems.report.tables.records import varying

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SLOW = 1.2  # a warm-up step slower than this multiple of the usual one is labelled with its cause
LOW_CLOCK = 0.95  # share of the highest observed clock


def warmup(records: Sequence[RunRecord], data: pd.DataFrame) -> Figure:
    """Draw every step in order, warm-up included; the slowest at each position is labelled with its causes."""
    measured = {i: r for i, r in enumerate(records) if r.is_timing and r.measurement and r.measurement.timed}
    worst = sorted(measured, key=lambda i: _slowest(measured[i]), reverse=True)[:MOST_CURVES]
    colored = dict(zip(sorted(worst), zip(COLORS, MARKERS, strict=True), strict=False))
    names = dict(zip(data["record"], labels(data, varying(data)[0]), strict=True))
    drawn, axes = one_panel(4.2)
    slowest: dict[int, tuple[float, Sample, float | None]] = {}
    for i in (*colored, *(i for i in measured if i not in colored)):
        record = measured[i]
        assert record.measurement
        taken = record.measurement.samples
        usual = record.measurement.median_s() or math.nan
        clock = max((s.sm_clock_hz for s in taken if s.sm_clock_hz), default=None)
        ratios = [s.wall_s / usual for s in taken]
        numbers = range(1, len(taken) + 1)
        if i in colored:
            color, marker = colored[i]
            axes.plot(numbers, ratios, color=color, marker=marker, markersize=4, linewidth=1.2, label=names[i])
        else:
            axes.plot(numbers, ratios, zorder=1.5, **CROWD)
        for number, ratio, sample in zip(numbers, ratios, taken, strict=True):
            if ratio > max(SLOW, slowest.get(number, (0.0,))[0]):
                slowest[number] = (ratio, sample, clock)
    previous = ""
    for number, (ratio, sample, clock) in sorted(slowest.items()):
        cause = ", ".join(causes(sample, clock)) or "cause not recorded"
        if cause != previous:
            at: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9}
            on_patch(axes.annotate(cause, (number, ratio), (8, 0), **at))
        previous = cause
    warm = max(sum(s.warmup for s in r.measurement.samples) for r in measured.values() if r.measurement)
    if more := len(measured) - len(colored):
        axes.plot([], [], label=f"{more} more cells, with a smaller slowest step", **CROWD)
    axes.axvspan(0.5, warm + 0.5, color=GREY, alpha=0.12, linewidth=0, label="warm-up, not counted")
    log_scale(axes.yaxis, "{:,g}×".format)
    axes.set_ylabel("step time / median of the timed steps")
    axes.set_xlabel("step")
    axes.set_xlim(left=0.5)
    return with_legend(drawn, axes)


def _slowest(record: RunRecord) -> float:
    """Return the time of the slowest step, in medians of the timed steps."""
    assert record.measurement
    usual = record.measurement.median_s()
    return max(sample.wall_s for sample in record.measurement.samples) / usual if usual else 0.0


def causes(sample: Sample, highest_clock_hz: float | None) -> list[str]:
    """Return the recorded causes of a slow step; empty if none were recorded."""
    found = []
    if sample.compiles or sample.compile_s:
        spent = f" {units.human(sample.compile_s, 's')}" if sample.compile_s else ""
        found.append(f"compiling{spent}")
    if sample.device_mallocs:
        found.append(f"{sample.device_mallocs:,} cudaMalloc")
    if sample.sm_clock_hz and highest_clock_hz and sample.sm_clock_hz < LOW_CLOCK * highest_clock_hz:
        found.append(f"clock at {units.human(sample.sm_clock_hz, 'hz')}")
    return found
