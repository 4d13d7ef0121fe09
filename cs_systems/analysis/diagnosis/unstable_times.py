"""Rule for unstable times: the timed steps differ so much that their median is not a result."""

from __future__ import annotations

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.statistics import unstable
from cs_systems.core.tables import Row

FEWEST = 3  # least number of samples that show a spread


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a spread or a drift of the timed steps; at best, every step is as fast as the fastest."""
    measurement = None if evidence.has_mixed_steps else evidence.measurement
    durations = measurement.durations_s("step") if measurement else []
    if evidence.step_s is None or len(durations) < FEWEST or not (reasons := unstable(durations)):
        return None
    row: Row = {"steps": len(durations), "fastest_s": min(durations), "slowest_s": max(durations)}
    return Diagnosis(reasons[0], evidence.remedy("unstable"), evidence.step_s, min(durations), evidence=(row,))


RULE = Rule(find)
