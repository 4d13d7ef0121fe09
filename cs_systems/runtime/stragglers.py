"""The record of a cell that ran on N ranks, made of one record a rank.

A sample is the slowest rank's: of the step, and of each phase. What each rank took is kept beside it, as medians over
the timed steps, in the table `ranks`: {rank, phase, median_s, wait_s, peak_allocated_bytes, peak_reserved_bytes}.

Waiting is told apart from transfer: the ranks begin a step together, so a rank that reaches a phase `wait_s` before the
last one waits so long in it for its peers, if it is one that needs them all (`synchronize`, a collective); the rest of
`median_s` is transfer. The rank that comes last waits for nobody: its time in that phase is transfer alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

from cs_systems.core.caveats import Caveat
from cs_systems.record import Measurement, Row, RunRecord, Sample


class Answer(Protocol):
    """A rank's record of a cell. `of_peers`: it failed only because it waited for another rank."""

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def of_peers(self) -> bool: ...

    @property
    def failed(self) -> bool: ...


def verdict(answers: Mapping[int, Answer], names: Sequence[str]) -> RunRecord:
    """Make one record of the ranks' answers, in the order in which they came; of all ranks, unless one failed.

    Of failures the first counts that is a rank's own. It is told as that rank's, unless all ranks have the same.
    """
    records = {rank: RunRecord.from_dict(answer.record) for rank, answer in answers.items()}
    failures = [rank for rank, answer in answers.items() if answer.failed]
    if failures:
        rank = next((rank for rank in failures if not answers[rank].of_peers), failures[0])
        record = records[rank]
        if len(records) == len(names) and len({r.reason for r in records.values()}) == 1:
            return record
        return replace(record, reason=f"{names[rank]}: {record.reason}")
    in_order = [records[rank] for rank in range(len(names))]
    return next((r for r in in_order if r.status == "unavailable"), None) or merged(in_order)


def merged(records: Sequence[RunRecord]) -> RunRecord:
    """One record of all ranks; `records[i]` is rank i's. All of them are ok."""
    first, measurements = records[0], [r.measurement for r in records if r.measurement is not None]
    assert len(measurements) == len(records)
    together = replace(
        measurements[0],
        samples=tuple(map(_slowest, zip(*(m.samples for m in measurements), strict=True))),
        setup_s=max(m.setup_s for m in measurements),
        peak_allocated_bytes=_largest(m.peak_allocated_bytes for m in measurements),
        peak_reserved_bytes=_largest(m.peak_reserved_bytes for m in measurements),
    )
    results = {**first.results, "ranks": ranks_table(measurements)}
    if "memory" in first.results:
        peak = {"peak_allocated_bytes": together.peak_allocated_bytes}
        results["memory"] = [{**row, **peak} for row in first.results["memory"]]
    return replace(first, measurement=together, warnings=_warnings(records), results=results)


def ranks_table(measurements: Sequence[Measurement]) -> list[Row]:
    """A row a rank and phase, `step` at last; the peaks stand in the row of the step."""
    rows: list[Row] = []
    for rank, measurement in enumerate(measurements):
        unknown: Row = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
        for phase in measurement.phase_names():
            durations = measurement.durations_s(phase)
            waits = [max(_start_s(s, phase) for s in of) - _start_s(of[rank], phase) for of in _steps(measurements)]
            rows.append(
                {"rank": rank, "phase": phase, "median_s": median(durations), "wait_s": median(waits), **unknown}
            )
        peaks = {name: getattr(measurement, name) for name in unknown}
        whole = median(measurement.durations_s("step"))
        rows.append({"rank": rank, "phase": "step", "median_s": whole, "wait_s": None, **peaks})
    return rows


def _steps(measurements: Sequence[Measurement]) -> Iterable[tuple[Sample, ...]]:
    """Of each timed step the samples of all ranks."""
    return zip(*(m.timed for m in measurements), strict=True)


def _start_s(sample: Sample, phase: str) -> float:
    """When in the step the phase began, as the phases before it took so long."""
    return sum(list(sample.phases_s.values())[: list(sample.phases_s).index(phase)])


def _slowest(samples: Sequence[Sample]) -> Sample:
    slowest = max(samples, key=lambda s: s.wall_s)
    return replace(
        slowest,
        phases_s={phase: max(s.phases_s[phase] for s in samples) for phase in slowest.phases_s},
        device_mallocs=_largest(s.device_mallocs for s in samples),
        compiles=_largest(s.compiles for s in samples),
        compile_s=_largest(s.compile_s for s in samples),
    )


def _largest(values: Iterable[Any]) -> Any:
    """None where no rank knows."""
    return max((v for v in values if v is not None), default=None)


def _warnings(records: Sequence[RunRecord]) -> tuple[Caveat, ...]:
    """Of each kind the first rank's that has it."""
    kinds: dict[str, Caveat] = {}
    for record in records:
        for caveat in record.warnings:
            kinds.setdefault(caveat.code, caveat)
    return tuple(kinds.values())
