"""Rule for late kernels: the GPU is idle although the host has launched the next kernel, for a few long times."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import LATENCY
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

# Least share of the longest wait: many short waits are the usual time between two kernels of a stream.
NOTABLE = 0.1
REMEDY = (
    "find what the kernel after the gap waits for, in the timeline (--format html): another stream, a first launch "
    "(warm up longer), another process on the GPU"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which a launched kernel did not start."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(LATENCY)
    rows = evidence.gaps_by(LATENCY)
    if step_s is None or not idle_s or not rows:
        return None
    longest_s, waited_s = rows[0].get("longest_s"), rows[0]["time_s"]
    if longest_s is None or longest_s < NOTABLE * waited_s:
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU is idle although the next kernel is launched"
    return Diagnosis(cause, REMEDY, step_s, step_s - idle_s, evidence=rows)


RULE = Rule(find)
