"""Rule for an offloaded optimizer: the CPU updates the weights, and the GPU has nothing to compute meanwhile."""

from __future__ import annotations

from cs_systems.analysis.attribution.offload import offload
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row

NOTABLE = 0.05  # share of the step
REMEDY = (
    "where memory allows, keep the optimizer's state on the GPU: shard it over ranks, or hold it in bf16 or 8 bits; "
    "else update in parts while backward runs"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which gradients travel to the host and weights back; at best none is left."""
    step_s = evidence.step_s
    found = offload(evidence.usual.profile) if evidence.usual and evidence.usual.profile.gaps else None
    if step_s is None or found is None or found.time_s < NOTABLE * step_s:
        return None
    takes = min(step_s, found.time_s)
    copied_s = found.down_s + found.up_s
    cause = (
        f"{takes / step_s:.0%} of the step the CPU updates the weights while the GPU computes nothing, "
        f"{copied_s / takes:.0%} of it in copies of gradients and weights"
    )
    row: Row = {"time_s": found.time_s, "to_host_s": found.down_s, "to_device_s": found.up_s}
    return Diagnosis(cause, REMEDY, step_s, step_s - takes, evidence=(row,), takes=takes)


RULE = Rule(find, refines=("host-time", "blocking-copies", "host-synchronisation", "launch-bound"))
