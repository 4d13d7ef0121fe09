"""Rule for operators with more threads than cores: the threads wait for each other in every operator."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import THREADS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

SLOWER = 1.3  # times the operator with a thread per core
PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find more threads than cores by a measured operator; what the step gains, only a run without them can tell."""
    row, step_s = THREADS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or not row["of_cores_s"] or row["time_s"] < SLOWER * row["of_cores_s"]:
        return None
    lasted_s = min(step_s, evidence.phases_s(*PHASES))
    ratio = row["time_s"] / row["of_cores_s"]
    cause = (
        f"torch uses {row['threads']} threads on {row['cores']} cores: an elementwise operator takes {ratio:.2g} times "
        f"as long as with {row['cores']}, and operators are in {lasted_s / step_s:.0%} of the step"
    )
    remedy = f"leave torch.set_num_threads and OMP_NUM_THREADS out, or set at most {row['cores']}"
    return Diagnosis(cause, remedy, step_s, takes=lasted_s * (1 - 1 / ratio), evidence=(row,))


RULE = Rule(find)
