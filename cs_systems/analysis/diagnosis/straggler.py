"""Rule for a straggler: one rank begins its phases later than the others, which wait for it."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.formulas.communication import RANKS

REMEDY = "compare its batch, its GPU's clock and other processes, and its host's load with those of the other ranks"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the rank that waits least; at best it is as fast as the rank that waits longest."""
    step_s = evidence.step_s
    waits: dict[int, float] = {}
    rows: list[Row] = [row for row in RANKS.of(evidence.tables) if row.get("wait_s") is not None]
    for row in rows:
        waits[row["rank"]] = waits.get(row["rank"], 0.0) + row["wait_s"]
    if step_s is None or len(waits) < 2:
        return None
    slowest, fastest = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
    lost_s = min(step_s, waits[fastest] - waits[slowest])
    cause = f"rank {fastest} waits {lost_s / step_s:.0%} of the step for rank {slowest}"
    return Diagnosis(cause, REMEDY, step_s, step_s - lost_s, evidence=tuple(rows))


RULE = Rule(find)
