"""Rule for checks of torch.distributions, for each of which the host waits for the GPU."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import DISTRIBUTION_CHECKS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at

MOST = 2  # lines that are named
OFF = "torch.distributions.Distribution.set_default_validate_args(False)"
REMEDY = f"leave them out once the program works: {OFF} before the loop, or validate_args=False for each distribution"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the host's time in these checks, at most that in which the GPU waits for the host, but not for a batch.

    A wait for a busy GPU takes no time of the step: the first one lasts until the GPU's queue is empty.
    """
    rows, step_s = DISTRIBUTION_CHECKS.of(evidence.tables), evidence.step_s
    if not rows or step_s is None:
        return None
    waited_s = evidence.host_bound_s if "gaps" in evidence.tables else evidence.launch_bound_s
    takes = min(step_s, rows[0]["step_time_s"], max(0.0, waited_s - evidence.input_s))
    cause = (
        f"the host waits for the GPU {rows[0]['step_waits']} times per step while torch.distributions checks "
        f"parameters and samples, {takes / step_s:.0%} of the step"
    )
    where = ", ".join(
        f"{called_at(row['function'], row['place'], row['distribution'])} ({row['waits']})" for row in rows[:MOST]
    )
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=tuple(rows), where=where)


# Until the waits are gone, no graph can hold the step.
RULE = Rule(find, refines=("host-synchronisation",), precedes=("launch-bound",))
