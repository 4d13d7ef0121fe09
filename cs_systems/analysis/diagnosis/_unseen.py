"""Question that a loop leaves open if nothing was observed inside its phases: their times alone show few causes."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNSAMPLED
from cs_systems.analysis.diagnosis._evidence import LEAST_OF_LOOP, Evidence
from cs_systems.config import Phase

PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)


def unseen(evidence: Evidence) -> str:
    """Return what cannot be told if a loop's stack was not sampled and no kernels are known, and what to do; or ""."""
    row, step_s = UNSAMPLED.first(evidence.tables), evidence.step_s
    if row is None or not step_s or not evidence.is_loop or evidence.busy_s is not None:
        return ""
    inside_s = min(step_s, evidence.phases_s(*PHASES))
    if inside_s < LEAST_OF_LOOP * step_s:
        return ""
    return f"what takes {inside_s / step_s:.0%} of the step inside the model's phases: {row['reason']}; {row['remedy']}"
