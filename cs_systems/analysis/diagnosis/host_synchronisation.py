"""Rule for host synchronisation: the GPU is idle because the host waits for it instead of launching kernels."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import SYNC
from cs_systems.analysis.attribution.tables import gaps
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row

PLAIN = "wait for the device less often: keep results there, and check them after many kernels"
REMEDY = "remove .item(), .cpu(), print and torch.cuda.synchronize() from the step, or call them every 100th step"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the gaps in which the host was in a synchronising call."""
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(SYNC)
    if step_s is None or not idle_s:
        return None
    cause = f"{idle_s / step_s:.0%} of the step the GPU is idle while the host synchronises with it"
    rows: tuple[Row, ...] = tuple(row for row in gaps.of(evidence.tables) if row["cause"] == SYNC)
    remedy = REMEDY if evidence.uses_torch else PLAIN
    return Diagnosis(cause, remedy, step_s, step_s - idle_s, evidence=rows)


RULE = Rule(find)
