"""Rule for a throttled clock: the GPU lowered its clock during the timed steps."""

from __future__ import annotations

from statistics import median

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.timing_caveats import CLOCK_LIMIT
from cs_systems.core.tables import Row


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a clock below the highest, with the reason; at best, the step speeds up by the ratio of the clocks."""
    step_s, highest = evidence.step_s, evidence.clock_max_hz
    clocks = [s.sm_clock_hz for s in evidence.measurement.timed if s.sm_clock_hz] if evidence.measurement else []
    if step_s is None or not highest or not clocks or not evidence.throttle_reasons:
        return None
    clock = median(clocks)
    if clock >= CLOCK_LIMIT * highest:
        return None
    reasons = ", ".join(evidence.throttle_reasons)
    cause = f"the SM clock ran at {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({reasons})"
    row: Row = {"sm_clock_hz": clock, "sm_clock_max_hz": highest}
    return Diagnosis(cause, evidence.remedy("throttled"), step_s, step_s * clock / highest, evidence=(row,))


RULE = Rule(find)
