"""Rule for half precision on a CPU that has no instructions for it, so that it takes longer than fp32."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import HALF_PRECISION
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

SLOWER = 1.5  # times the operator in fp32
PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find half precision that a measured operator shows to be slower; only a step in fp32 tells the gain."""
    rows, step_s = HALF_PRECISION.of(evidence.tables), evidence.step_s
    row = max(rows, key=lambda each: each["time_s"] / each["float32_s"], default=None)
    if row is None or step_s is None or row["time_s"] < SLOWER * row["float32_s"]:
        return None
    lasted_s, ratio = min(step_s, evidence.phases_s(*PHASES)), row["time_s"] / row["float32_s"]
    operator = f"a {row['operator']} with its gradients"
    cause = (
        f"the model computes in {row['precision']}, for which this CPU is slow: {operator} takes {ratio:.2g} times as "
        f"long as in fp32, and forward, loss and backward are {lasted_s / step_s:.0%} of the step"
    )
    out = "leave torch.autocast out" if row["is_autocast"] else "model.float() and inputs in fp32"
    return Diagnosis(
        cause, f"compute in fp32 on this CPU: {out}", step_s, takes=lasted_s * (1 - 1 / ratio), evidence=(row,)
    )


RULE = Rule(find, refines=("small-operators",))
