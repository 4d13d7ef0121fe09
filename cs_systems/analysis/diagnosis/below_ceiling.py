"""Rule for a timed step far below the ceiling of its FLOPs and bytes, if no trace shows why."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.fields import Subject
from cs_systems.core.tables import Row

NOTABLE = 3.0  # times the ceiling; well-tuned training steps need less
REMEDY = "profile the step to see the cause (cs-systems profile --with kineto)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the phases that take far longer than their ceiling allows, if no trace was recorded."""
    step_s, measurement, config = evidence.step_s, evidence.measurement, evidence.config
    if step_s is None or measurement is None or config is None or "gaps" in evidence.tables:
        return None
    if evidence.device_name is None or config.subject is Subject.ATTENTION:  # `profile` does not take such cells
        return None
    rows: list[Row] = [
        {"phase": phase, "median_s": evidence.phase_s(phase), "ceiling_s": floor}
        for phase in measurement.phase_names()
        if (floor := evidence.floor_s(phase))
    ]
    rows = [row for row in rows if row["median_s"] > NOTABLE * row["ceiling_s"]]
    lasted_s, least_s = (sum(row[name] for row in rows) for name in ("median_s", "ceiling_s"))
    if not rows:
        return None
    names = ", ".join(row["phase"] for row in rows)
    cause = f"the step takes {lasted_s / least_s:.1f} times as long as its FLOPs and bytes need ({names})"
    return Diagnosis(cause, REMEDY, step_s, step_s - lasted_s + least_s, evidence=tuple(rows), is_last_resort=True)


RULE = Rule(find)
