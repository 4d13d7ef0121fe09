"""Rule for an offloaded optimizer: the CPU updates the weights, and the GPU has nothing to compute meanwhile."""

from __future__ import annotations

from cs_systems.analysis.attribution.tables import cpu_updates, mean_step_s, steps
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

NOTABLE = 0.05  # share of the step
REMEDY = (
    "where memory allows, keep the optimizer's state on the GPU: shard it over ranks, or hold it in bf16 or 8 bits; "
    "else update in parts while backward runs"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which gradients travel to the host and weights back; at best none is left."""
    step_s, found = evidence.step_s, cpu_updates.first(evidence.tables)
    if step_s is None or found is None or found["time_s"] < NOTABLE * step_s:
        return None
    recorded_s = mean_step_s(steps.of(evidence.tables)) or step_s  # longer than the step without the profiler
    takes = step_s * min(1.0, found["time_s"] / recorded_s)
    copied = min(1.0, (found["to_host_s"] + found["to_device_s"]) / found["time_s"])
    cause = (
        f"{takes / step_s:.0%} of the step the CPU updates the weights while the GPU computes nothing, "
        f"{copied:.0%} of it in copies of gradients and weights"
    )
    return Diagnosis(cause, REMEDY, step_s, step_s - takes, evidence=(found,), takes=takes)


RULE = Rule(find, refines=("host-time", "blocking-copies", "host-synchronisation", "launch-bound"))
