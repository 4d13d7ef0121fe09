"""Rule for imbalanced experts: an all-to-all brings some ranks many more tokens than others, which wait for them."""

from __future__ import annotations

from cs_systems.analysis.comparison.late_ranks import is_uneven, received
from cs_systems.analysis.comparison.loop_ranks import LATE_RANK, LateRankRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = "balance the experts: an auxiliary loss or bias of the router, a capacity limit, or experts placed by load"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the rank with most tokens or most computation in its experts; at best without its delay."""
    job, step_s = evidence.job, evidence.step_s
    if job is None:
        return next((_of_loop(late, step_s) for late in LATE_RANK.of(evidence.tables) if step_s), None)
    # only few steps have the traces of all ranks
    from cs_systems.analysis.comparison.expert_work import imbalance
    from cs_systems.analysis.comparison.ranks import straggler

    late = straggler(job)
    if late is None or (words := imbalance(job, late.rank)) is None:
        return None
    return Diagnosis(_cause(late.rank, words, late.delay_s), REMEDY, job.step_s, late.least_s, subject=late.in_words)


def _of_loop(late: LateRankRow, step_s: float) -> Diagnosis | None:
    """Find the rank of a loop with most of the tokens."""
    times, delay_s = late["received_times"], late["share"] * step_s
    if not is_uneven(times):
        return None
    return Diagnosis(_cause(late["rank"], received(times), delay_s), REMEDY, step_s, step_s - delay_s)


def _cause(rank: int, words: str, delay_s: float) -> str:
    return f"rank {rank} {words}, and delays the others by {human(delay_s, 's')} of each step"


RULE = Rule(find, refines=("exposed-communication",))
