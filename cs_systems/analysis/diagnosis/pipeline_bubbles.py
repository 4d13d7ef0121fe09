"""Rule for pipeline bubbles: a stage waits in sends and receives, with no microbatch to compute meanwhile."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_ranks import EXCHANGE
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

REMEDY = (
    "split the batch into more microbatches, use an interleaved or zero-bubble schedule, or give all stages the same "
    "work"
)

STAGES = "the stages of a pipeline wait in sends and receives, on average"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the exposed time of sends and receives between two ranks: waiting for the other stage, and transfer."""
    found, step_s = evidence.distribution, evidence.step_s
    if step_s is None:
        return None
    for row in EXCHANGE.of(evidence.tables):
        share = row["pairwise_share"]
        return Diagnosis(f"{share:.0%} of the step {STAGES}", REMEDY, step_s, step_s * (1 - share)) if share else None
    if found is None or not found.in_pairs or not evidence.uses_torch:  # a solver's exchange is no pipeline's stage
        return None
    exposed_s = found.exposed_s(found.in_pairs)
    cause = f"{exposed_s / step_s:.0%} of the step this stage of a pipeline waits in sends and receives"
    return Diagnosis(cause, REMEDY, step_s, step_s - exposed_s, subject=evidence.subject)


RULE = Rule(find)
