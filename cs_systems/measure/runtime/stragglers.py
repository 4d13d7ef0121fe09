"""Record of a cell that ran on N ranks, merged from one record per rank.

A sample comes from the straggler, the rank with the longest step: its step, and its phases, which add up to the step.
If steps end together, the straggler is the rank that the others waited for. The times of each rank are also kept, as
medians over the timed steps, in the table `ranks`.

Waiting is separated from transfer: the ranks begin a step together, so a rank that reaches a phase `wait_s` before the
last one waits that long in it for its peers, if the phase needs them all (`synchronize`, a collective); the rest of
`median_s` is transfer. The last rank to arrive does not wait: all its time in that phase is transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol, cast

from cs_systems.core.caveats import Caveat
from cs_systems.core.statistics import largest, total
from cs_systems.core.tables import first_row
from cs_systems.formulas.communication import RANKS, RankRow
from cs_systems.formulas.energy import ENERGY, joined
from cs_systems.formulas.memory.tables import MEMORY, PeaksRow
from cs_systems.formulas.rank_layout import data_ranks
from cs_systems.record import RAN, Measurement, Ran, RunRecord, Sample

TOGETHER = 0.005  # Largest difference of the ends of ranks that waited for each other, as a share of the step.


class Answer(Protocol):
    """Record of a cell from one rank; `of_peers` if it failed only because it waited for another rank."""

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def of_peers(self) -> bool: ...

    @property
    def failed(self) -> bool: ...


def verdict(answers: Mapping[int, Answer], names: Sequence[str]) -> RunRecord:
    """Return one record from the ranks' answers in their order of arrival: merged from all ranks, or of a failure.

    A failure is taken from the first rank that caused it itself. The reason names that rank, unless all ranks have the
    same reason.
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


def merged(records: Sequence[RunRecord], *, begin_together: bool = True) -> RunRecord:
    """Merge the records of all ranks, all with status ok, into one; `records[i]` comes from rank i.

    begin_together: whether the ranks begin each step together, so that the phases show who waited.
    """
    first, measurements = records[0], [r.measurement for r in records if r.measurement is not None]
    assert len(measurements) == len(records)
    together = replace(
        measurements[0],
        samples=tuple(
            _merged_sample(of_ranks, TOGETHER if begin_together else 0.0)
            for of_ranks in zip(*(m.samples for m in measurements), strict=True)
        ),
        setup_s=max(m.setup_s for m in measurements),
        peak_allocated_bytes=largest(m.peak_allocated_bytes for m in measurements),
        peak_reserved_bytes=largest(m.peak_reserved_bytes for m in measurements),
    )
    results = {**first.results, **RANKS.filled(ranks_table(measurements))}
    if "memory" in first.results:
        peak = together.peak_allocated_bytes
        results |= MEMORY.filled([{**row, "peak_allocated_bytes": peak} for row in MEMORY.of(first.results)])
    if all(ENERGY.name in record.results for record in records):
        rows = [row for record in records for row in ENERGY.of(record.results)]
        results |= ENERGY.filled(joined(rows, at_once=True))
    if "ran" in first.results:
        results |= RAN.filled([{**RAN.of(first.results)[0], **_counts(records)}])
    return replace(first, measurement=together, warnings=_warnings(records), results=results)


def _counts(records: Sequence[RunRecord]) -> Ran:
    """Return the tokens and samples of all ranks in the timed steps, if batches differ between steps or ranks."""
    rows = [first_row(record.results, "ran") for record in records]
    steps = [len(record.measurement.timed) for record in records if record.measurement is not None]
    counts: dict[str, int | None] = {}
    for what, together in (("tokens", "timed_tokens"), ("samples", "timed_samples")):
        each = [row.get(what) for row in rows]
        if len({*each}) == 1 and not any(together in row for row in rows):
            continue
        ranks = [row.get(together, _times(own, n)) for row, own, n in zip(rows, each, steps, strict=True)]
        whole = total(ranks)  # ranks that divide a model's blocks have the same batches
        counts[together] = None if whole is None else whole * data_ranks(records[0].config) // len(records)
        counts[what] = each[0] if len({*each}) == 1 else None
    return cast(Ran, counts)


def _times(count: int | None, steps: int) -> int | None:
    return None if count is None else count * steps


def ranks_table(measurements: Sequence[Measurement]) -> list[RankRow]:
    """Return one row for each rank and phase, `step` last."""
    rows: list[RankRow] = []
    for rank, measurement in enumerate(measurements):
        unknown: PeaksRow = {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
        for phase in measurement.phase_names():
            durations = measurement.durations_s(phase)
            waits = [max(_start_s(s, phase) for s in of) - _start_s(of[rank], phase) for of in _steps(measurements)]
            rows.append(
                {"rank": rank, "phase": phase, "median_s": median(durations), "wait_s": median(waits), **unknown}
            )
        peaks: PeaksRow = {
            "peak_allocated_bytes": measurement.peak_allocated_bytes,
            "peak_reserved_bytes": measurement.peak_reserved_bytes,
        }
        whole = median(measurement.durations_s("step"))
        rows.append({"rank": rank, "phase": "step", "median_s": whole, "wait_s": None, **peaks})
    return rows


def _steps(measurements: Sequence[Measurement]) -> Iterable[tuple[Sample, ...]]:
    """Yield the samples of all ranks for each timed step."""
    return zip(*(m.timed for m in measurements), strict=True)


def _start_s(sample: Sample, phase: str) -> float:
    """Return when the phase starts within the step, from the durations of earlier phases."""
    return sum(list(sample.phases_s.values())[: list(sample.phases_s).index(phase)])


def _merged_sample(samples: Sequence[Sample], tolerance: float) -> Sample:
    """Return the sample of the straggler, with the counters of all ranks.

    Ranks that wait for each other end their steps together; then the rank that reaches its phases last waits least.
    tolerance: share of the step by which such ends may differ.
    """
    longest_s = max(s.wall_s for s in samples)
    ended_last = [s for s in samples if s.wall_s >= longest_s * (1 - tolerance)]
    straggler = max(ended_last, key=lambda s: sum(_start_s(s, phase) for phase in s.phases_s))
    return replace(
        straggler,
        device_mallocs=largest(s.device_mallocs for s in samples),
        compiles=largest(s.compiles for s in samples),
        compile_s=largest(s.compile_s for s in samples),
    )


def _warnings(records: Sequence[RunRecord]) -> tuple[Caveat, ...]:
    """Return one caveat per code, from the first rank that has it."""
    kinds: dict[str, Caveat] = {}
    for record in records:
        for caveat in record.warnings:
            kinds.setdefault(caveat.code, caveat)
    return tuple(kinds.values())
