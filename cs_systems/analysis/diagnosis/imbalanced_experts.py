"""Rule for imbalanced experts: an all-to-all brings some ranks many more tokens than others, which wait for them."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = "balance the experts: an auxiliary loss or bias of the router, a capacity limit, or experts placed by load"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the rank with most tokens or most computation in its experts; at best without its delay."""
    job = evidence.job
    if job is None:
        return None
    # Few steps have the traces of all ranks.
    from cs_systems.analysis.comparison.expert_work import imbalance
    from cs_systems.analysis.comparison.ranks import straggler

    late = straggler(job)
    if late is None or (words := imbalance(job, late.rank)) is None:
        return None
    cause = f"rank {late.rank} {words}, and delays the others by {human(late.delay_s, 's')} of each step"
    return Diagnosis(cause, REMEDY, job.step_s, late.least_s, subject=late.in_words)


RULE = Rule(find, refines=("exposed-communication",))
