"""Remedies that a cell or an experiment of the same run measured; the measured time becomes the expected one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_high
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.diagnosis._findings import Diagnosis, Expected
from cs_systems.config import ConfigError, RunConfig, describe
from cs_systems.core.units import human
from cs_systems.record import RunRecord, median_s

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis._evidence import Evidence

TimedCells = Mapping[RunConfig, Sequence[RunRecord]]
NO_GAIN = 0.02  # a smaller share of the step counts as no gain


def timed_cells(records: Iterable[RunRecord]) -> TimedCells:
    """Return the records that were timed without a profiler, by cell."""
    cells: dict[RunConfig, list[RunRecord]] = {}
    for record in records:
        if record.status == "ok" and record.is_timing and not record.is_profiled:
            cells.setdefault(record.run_config.of_any_measurement, []).append(record)
    return cells


def with_measured(
    diagnosis: Diagnosis, config: RunConfig, timed: TimedCells, same: Collection[str] = ()
) -> Diagnosis | str:
    """Return the diagnosis with the fastest cell that carries out its remedy, if the run has one.

    If no such cell is faster, return a sentence about it: the run's rows refute the remedy.

    same: fields with the same value in all cells of the run, which are left out of the label.
    """
    if diagnosis.unit != "s" or not diagnosis.options:
        return diagnosis
    config = config.of_any_measurement
    now = median_s(timed.get(config, ()))
    measured = {
        cell: time_s
        for cell in _followed(config, diagnosis.options)
        if (time_s := median_s(timed.get(cell, ()))) is not None
    }
    if now is None or not measured:
        return diagnosis
    best = min(measured, key=measured.__getitem__)
    then = measured[best]
    name = describe(best, {*same} - {*diagnosis.options} | {"profiler"})
    if then > (1 - NO_GAIN) * now:
        why = ", because the step waits for the host" if diagnosis.then else ""
        return f"{name} was measured: {human(then, 's')} instead of {human(now, 's')}, no gain{why}"
    low, high = _spread(timed[best])
    return replace(diagnosis, now=now, expected=Expected(then, low, high, "measured"), try_it="", takes=None)


def _followed(config: RunConfig, options: Mapping[str, Collection[Any]]) -> Iterator[RunConfig]:
    """Yield the cells that differ from this one in a single field, with a value that carries out the remedy."""
    for name, values in options.items():
        for value in values:
            if value != getattr(config, name):
                try:
                    yield replace(config, **{name: value})
                except ConfigError:
                    continue


def _spread(records: Sequence[RunRecord]) -> tuple[float, float]:
    """Return the smallest and the largest median of the rounds and repeats."""
    medians: list[float] = []
    for record in records:
        by_round: dict[int, list[float]] = {}
        for sample in record.measurement.timed if record.measurement else ():
            by_round.setdefault(sample.round, []).append(sample.wall_s)
        medians += map(median_high, by_round.values())
    return min(medians), max(medians)


def after(evidence: Evidence, experiment: str, beside_s: float = 0.0) -> Expected | None:
    """Return the duration of the step that an experiment measured; None if it was not made.

    beside_s: time of the step that the experiment did not include, and that the remedy does not change.
    """
    row = evidence.experiment(experiment)
    if row is None or row["time_s"] is None:
        return None
    value, low, high = row["time_s"], row["low_s"], row["high_s"]
    least, most = (value if end is None else end for end in (low, high))
    return Expected(value + beside_s, least + beside_s, most + beside_s, "measured")


def with_part(
    evidence: Evidence, experiment: str, instead: str | None = None, host_factor: float = 1.0
) -> Expected | None:
    """Return the duration of the step if a part of it takes the time that an experiment measured; None if not made.

    It is also None if the step waits for the host, before the remedy or after it, since no experiment tells what the
    host takes then.

    instead: the variant; None for the fastest. host_factor: at most how many times as long the host takes to submit the
        step with the remedy.
    """
    row, step_s = evidence.experiment(experiment, instead), evidence.step_s
    if row is None or row["time_s"] is None or row["baseline_s"] is None or step_s is None or evidence.is_host_bound:
        return None
    rest_s = step_s - row["baseline_s"]
    if rest_s < 0:  # the parts overlap, so their sum exceeds the step
        return None
    if evidence.submit_s is not None and rest_s + row["time_s"] < host_factor * evidence.submit_s:
        return None
    low, high = (row["time_s"] if end is None else end for end in (row["low_s"], row["high_s"]))
    return Expected(rest_s + row["time_s"], rest_s + low, rest_s + high, "measured")
