"""Exposed communication: collectives run while nothing is computed beside them."""

from __future__ import annotations

from cs_systems.config import Phase
from cs_systems.core.rows import Row
from cs_systems.diagnosis import Diagnosis, Rule
from cs_systems.diagnosis._evidence import Evidence

REMEDY = (
    "overlap it with backward (DistributedDataParallel, FSDP; --strategy ddp_bucketed, fsdp), send bf16, or use a "
    "larger batch for each rank"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the exposed time of the worst rank or device; without a trace, what is left after backward."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    rows: list[Row] = list(evidence.tables.get("overlap", ()))
    if rows:
        worst = max(rows, key=_share)
        share = _share(worst)
    else:
        left_s = evidence.phase_s(Phase.SYNCHRONIZE) or 0.0
        worst, share = {"phase": Phase.SYNCHRONIZE.value, "median_s": left_s}, min(1.0, left_s / step_s)
    if not share:
        return None
    cause = f"{share:.0%} of the step is communication without computation beside it"
    return Diagnosis(cause, REMEDY, step_s, step_s * (1 - share), evidence=(worst,))


def _share(row: Row) -> float:
    """Return the exposed communication as a share of the traced step, of one rank or one device."""
    if row.get("share") is not None:
        return float(row["share"])
    return float(row["exposed_s"] / row["step_s"]) if row.get("step_s") else 0.0


RULE = Rule(find)
