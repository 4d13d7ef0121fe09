"""Rule for a straggler: one rank begins its phases later than the others, which wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cs_systems.analysis.diagnosis import Diagnosis, Rule, Unknown
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import human
from cs_systems.formulas.communication import RANKS

if TYPE_CHECKING:
    from cs_systems.analysis.comparison.ranks import Merged

REMEDY = "compare its batch, its GPU's clock and other processes, and its host's load with those of the other ranks"


def find(evidence: Evidence) -> Diagnosis | Unknown | None:
    """Find the rank that waits least; at best it is as fast as the rank that waits longest."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    if evidence.job is not None:
        return _of_job(evidence.job)
    waits: dict[int, float] = {}
    rows: list[Row] = [row for row in RANKS.of(evidence.tables) if row.get("wait_s") is not None]
    for row in rows:
        waits[row["rank"]] = waits.get(row["rank"], 0.0) + row["wait_s"]
    if len(waits) < 2:
        return None
    slowest, fastest = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
    lost_s = min(step_s, waits[fastest] - waits[slowest])
    cause = f"rank {fastest} waits {lost_s / step_s:.0%} of the step for rank {slowest}"
    return Diagnosis(cause, REMEDY, step_s, step_s - lost_s, evidence=tuple(rows))


def _of_job(job: Merged) -> Diagnosis | Unknown | None:
    """Find the rank that delays the others, and what it does longer than they do."""
    # Few steps have the traces of all ranks.
    from cs_systems.analysis.comparison.expert_work import imbalance
    from cs_systems.analysis.comparison.rank_work import INPUT
    from cs_systems.analysis.comparison.ranks import rank_rows, straggler

    late = straggler(job)
    if late is None:
        return Unknown("who waits for whom, because no collective of these traces could be matched across the ranks")
    if imbalance(job, late.rank) is not None:
        return None  # the rule of experts names it
    because = f", because {late.does_longer.cause}" if late.does_longer else ""
    is_late_for_data = late.does_longer is not None and late.does_longer.kind == INPUT
    return Diagnosis(
        f"rank {late.rank} delays the others by {human(late.delay_s, 's')} of each step{because}",
        late.does_longer.remedy if late.does_longer else REMEDY,
        job.step_s,
        late.least_s,
        evidence=tuple(cast(Row, row) for row in rank_rows(job)),
        subject=late.in_words,
        takes=min(late.more_s, job.step_s - late.least_s),
        refines=("data-input",) if is_late_for_data else (),
    )


RULE = Rule(find)
