"""Rule for blocking launches: each launch returns only when its kernel has ended, so that no work is queued."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row

ALL = 0.9  # share of the kernels with a known launch; some launch from a graph or another library's thread
REMEDY = "unset CUDA_LAUNCH_BLOCKING (and AMD_SERIALIZE_KERNEL), which serve to find a failing kernel"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time in which the GPU waits for the host, if nearly every launch lasts until its kernel has ended."""
    step_s, share = evidence.step_s, evidence.blocking_share
    if step_s is None or share < ALL or not evidence.host_bound_s:
        return None
    lost_s = evidence.host_bound_s
    cause = (
        f"{share:.0%} of the launches return only when their kernel has ended (CUDA_LAUNCH_BLOCKING), so that the GPU "
        f"waits for the host {lost_s / step_s:.0%} of the step"
    )
    row: Row = {"blocking_share": share, "time_s": lost_s}
    return Diagnosis(cause, REMEDY, step_s, step_s - lost_s, evidence=(row,))


RULE = Rule(find, refines=("launch-bound", "host-synchronisation", "host-time"))
