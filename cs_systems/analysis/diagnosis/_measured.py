"""Remedies that the same run has measured: the measured time is the expectation, or refutes the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from cs_systems.analysis.diagnosis._findings import Diagnosis, Expected
from cs_systems.config import FIELDS, RunConfig, describe
from cs_systems.core.units import human
from cs_systems.record import RunRecord, median_s

NO_GAIN = 0.02  # a smaller share of the step is no gain


def with_measured(
    diagnosis: Diagnosis, config: RunConfig, records: Iterable[RunRecord], same: Collection[str] = ()
) -> Diagnosis | str:
    """Return the diagnosis with the fastest cell that carries out its remedy, if the run has one.

    If no such cell is faster, return the sentence that says so: the run's rows refute the remedy.

    same: fields in which all cells of the run agree, and which need no name.
    """
    if diagnosis.unit != "s" or not diagnosis.options:
        return diagnosis
    timed = [record for record in records if record.status == "ok" and record.is_timing]
    now = median_s([record for record in timed if _changes(config, record.run_config) == {}])
    cells: dict[RunConfig, list[RunRecord]] = {}
    for record in timed:
        changed = _changes(config, record.run_config)
        if len(changed) == 1 and all(changed[name] in diagnosis.options.get(name, ()) for name in changed):
            cells.setdefault(record.run_config.of_any_measurement, []).append(record)
    measured = {cell: time_s for cell, found in cells.items() if (time_s := median_s(found)) is not None}
    if now is None or not measured:
        return diagnosis
    best = min(measured, key=measured.__getitem__)
    then = measured[best]
    name = describe(best, {*same} - {*diagnosis.options} | {"profiler"})
    if then > (1 - NO_GAIN) * now:
        why = ", because the step waits for the host" if diagnosis.is_second else ""
        return f"{name} was measured: {human(then, 's')} instead of {human(now, 's')}, no gain{why}"
    low, high = _spread(cells[best])
    return replace(diagnosis, now=now, expected=Expected(then, low, high, "measured"), try_it="", takes=None)


def _spread(records: Sequence[RunRecord]) -> tuple[float, float]:
    """Return the least and the largest median of the rounds and repeats."""
    medians: list[float] = []
    for record in records:
        by_round: dict[int, list[float]] = {}
        for sample in record.measurement.timed if record.measurement else ():
            by_round.setdefault(sample.round, []).append(sample.wall_s)
        medians += [sorted(walls)[len(walls) // 2] for walls in by_round.values()]
    return min(medians), max(medians)


def _changes(a: RunConfig, b: RunConfig) -> dict[str, object]:
    """Return the values of `b` in the fields of the computation in which the two differ."""
    return {
        name: getattr(b, name)
        for name, each in FIELDS.items()
        if each.field.identity and not each.field.is_measurement and getattr(a, name) != getattr(b, name)
    }
