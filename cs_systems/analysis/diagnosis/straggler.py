"""Rule for a straggler: one rank begins its phases later than the others, which wait for it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, cast

from cs_systems.analysis.comparison.late_ranks import (
    SAME_DATA,
    SAME_HOST,
    SAME_LOAD,
    SAME_TOKENS,
    is_uneven,
)
from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.comparison.loop_ranks import (
    BATCH,
    COMPUTE,
    INPUT,
    LATE_RANK,
    LOOP_RANKS,
    PYTHON,
    LateRankRow,
)
from cs_systems.analysis.diagnosis import Diagnosis, Rule, Unknown
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at, work_of
from cs_systems.core.tables import Row
from cs_systems.core.units import human
from cs_systems.formulas.communication import RANKS

if TYPE_CHECKING:
    from cs_systems.analysis.comparison.ranks import Merged

NOTABLE = 0.1  # share of a loop's step; smaller differences between ranks need no cause
UNEXPLAINED = 0.25  # the same without a known cause; on a busy machine, equal work takes longer by less than this
MOST_OF_IT = 0.5  # share of the time in which batches are made
REMEDY = "compare its batch, its GPU's clock and other processes, and its host's load with those of the other ranks"


def find(evidence: Evidence) -> Diagnosis | Unknown | None:
    """Find the rank that waits least; at best it is as fast as the rank that waits longest."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    if evidence.job is not None:
        return _of_job(evidence.job)
    if LOOP_RANKS.name in evidence.tables:
        return next((_of_loop(late, evidence, step_s) for late in LATE_RANK.of(evidence.tables)), None)
    waits, ahead_s = defaultdict[int, float](float), defaultdict[int, float](float)
    rows: list[Row] = [row for row in RANKS.of(evidence.tables) if row.get("wait_s") is not None]
    for row in rows:
        # A rank is ahead of the last one until the ranks join, so only the increase in a phase is additional waiting.
        rank = row["rank"]
        waits[rank] += max(0.0, row["wait_s"] - ahead_s[rank])
        ahead_s[rank] = row["wait_s"]
    if len(waits) < 2:
        return None
    slowest, fastest = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
    lost_s = min(step_s, waits[fastest] - waits[slowest])
    cause = f"rank {fastest} waits {lost_s / step_s:.0%} of the step for rank {slowest}"
    return Diagnosis(cause, REMEDY, step_s, step_s - lost_s, evidence=tuple(rows))


def _of_loop(late: LateRankRow, evidence: Evidence, step_s: float) -> Diagnosis | None:
    """Find the rank of a loop that delays the others, and the work in which it takes longer."""
    least = NOTABLE if late["work"] in (BATCH, INPUT, PYTHON) else UNEXPLAINED
    if late["share"] < least or is_uneven(late["received_times"]):
        return None  # noise, or the rule for experts reports it
    because, remedy = _work(late, step_s)
    return Diagnosis(
        f"rank {late['rank']} delays the others by {human(late['share'] * step_s, 's')} of each step "
        f"({late['share']:.0%}){because}",
        remedy,
        step_s,
        step_s * (1 - late["share"]),
        evidence=tuple(cast(Row, row) for row in LOOP_RANKS.of(evidence.tables)),
        refines=("exposed-communication", "own-python", "data-input", *_prepares(late, evidence, step_s)),
    )


def _prepares(late: LateRankRow, evidence: Evidence, step_s: float) -> tuple[str, ...]:
    """Return the code of the rule for batches made by the loop, if one rank alone makes most of them."""
    made_s = sum(row["time_s"] for row in OWN_PYTHON.of(evidence.tables) if row.get("feeds_model"))
    alone = late["work"] == PYTHON and late["extra_share"] * step_s > MOST_OF_IT * made_s
    return ("batch-preparation",) if alone else ()


def _work(late: LateRankRow, step_s: float) -> tuple[str, str]:
    """Return the work in which the last rank takes longer, as a clause, and the remedy."""
    longer = f"{human(late['extra_share'] * step_s, 's')} longer"
    if late["work"] == BATCH:
        return f", because its batch is {late['batch_times']:.2g} times as large as the others'", SAME_TOKENS
    if late["work"] == COMPUTE:
        return f", because its {late['phase']} takes {longer}", SAME_LOAD
    if late["work"] == INPUT:
        return f", because it waits {longer} for its batch", SAME_DATA
    if late["work"] != PYTHON:
        return "", REMEDY
    if late["place"] is None:
        return f", because its host is {longer} in Python", SAME_HOST
    where = called_at(late["function"], late["place"], late["calls"])
    work = work_of(late["function"], late["calls"])
    return f", because it spends {longer} in {where}", work.remedy if work else SAME_HOST


def _of_job(job: Merged) -> Diagnosis | Unknown | None:
    """Find the rank that delays the others, and the work in which it takes longer."""
    # only few steps have the traces of all ranks
    from cs_systems.analysis.comparison.expert_work import imbalance
    from cs_systems.analysis.comparison.rank_work import INPUT as LATE_DATA
    from cs_systems.analysis.comparison.ranks import rank_rows, straggler

    late = straggler(job)
    if late is None:
        return Unknown("who waits for whom, because no collective of these traces could be matched across the ranks")
    if imbalance(job, late.rank) is not None:
        return None  # the rule for experts reports it
    because = f", because {late.does_longer.cause}" if late.does_longer else ""
    is_late_for_data = late.does_longer is not None and late.does_longer.kind == LATE_DATA
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
