"""Profiler of the errors of a user's own model in low precision; the workload `workloads._foreign_errors` runs it."""

from __future__ import annotations

from pathlib import Path

from cs_systems.analysis.comparison.precision import PRECISION_ERROR
from cs_systems.measure.profilers import Collected, ProfileLost, Profiler
from cs_systems.record import RunRecord


def collect(out: Path, record: RunRecord) -> Collected:
    if not PRECISION_ERROR.of(record.results):
        raise ProfileLost(
            "the profiler precision_error measures only a model of your own; set workload to path.py:name, or, for "
            "the built-in model, set workload to precision_error and leave out profiler"
        )
    return Collected()


PROFILER = Profiler(collect=collect, measures="values", compares=True)
