"""Rule for imbalanced experts: an all-to-all brings some ranks many more tokens than others, which wait for them."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

REMEDY = "balance the experts: an auxiliary loss or bias of the router, a capacity limit, or experts placed by load"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the rank with most of the tokens; at best the step takes as long as without its delay."""
    job = evidence.job
    if job is None:
        return None
    # Few steps have the traces of all ranks.
    from cs_systems.analysis.comparison.ranks import UNEVEN, imbalance, straggler

    late = straggler(job)
    if late is None or (times := imbalance(job, late.rank)) < UNEVEN:
        return None
    cause = (
        f"rank {late.rank} receives {times:.2g} times the mean of all ranks in all-to-all, and delays the others by "
        f"{human(late.delay_s, 's')} of each step"
    )
    return Diagnosis(cause, REMEDY, job.step_s, late.least_s, subject=late.in_words)


RULE = Rule(find, refines=("exposed-communication",))
