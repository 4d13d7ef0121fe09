"""Rule for gradient accumulation: gradients are averaged in every pass, although the optimizer steps after several."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

REMEDY = (
    "average them in the last pass alone: run the others, forward and backward, under DistributedDataParallel.no_sync()"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find all-reduces in passes before the last one of an update; without them, their exposed time is gone."""
    found, step_s = evidence.distribution, evidence.step_s
    if found is None or step_s is None or not found.early:
        return None
    reduces = sum(call.name == "all_reduce" for call in found.calls)
    passes = found.passes / found.updates
    exposed_s = found.exposed_s(found.early)
    cause = (
        f"gradients are averaged in each of {passes:.2g} passes per update: {len(found.early)} of {reduces} "
        "all-reduces are not needed"
    )
    return Diagnosis(cause, REMEDY, step_s, step_s - exposed_s, subject=evidence.subject)


RULE = Rule(find, refines=("exposed-communication",))
