"""Rule for many small operators on a CPU: their overhead takes the time, not their arithmetic."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import FORWARD_OPERATORS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.config import Phase
from cs_systems.core.units import human

FEWEST = 300  # operators of a forward pass; a loop over samples or time steps has more
MOST_ARITHMETIC = 0.25  # share of the time of forward and backward, in the fastest step
PASSES = 3  # arithmetic of forward and backward, as a multiple of forward's
NOTABLE = 0.10  # share of the step
PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
REMEDY = (
    "compute more in one operator: a whole batch in place of one sample, nn.LSTM in place of a loop over cells; or "
    "compile (torch.compile)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find forward and backward passes whose results are too small to explain their time."""
    row = FORWARD_OPERATORS.first(evidence.tables)
    step_s, measurement = evidence.step_s, evidence.measurement
    if row is None or step_s is None or measurement is None or not measurement.timed or row["operators"] < FEWEST:
        return None
    least_s = min(sum(sample.phases_s.get(phase, 0.0) for phase in PHASES) for sample in measurement.timed)
    arithmetic_s = PASSES * row["arithmetic_s"]
    lasted_s = min(step_s, evidence.phases_s(*PHASES))
    if arithmetic_s > MOST_ARITHMETIC * least_s or lasted_s < NOTABLE * step_s:
        return None
    each_s, place = lasted_s / row["operators"], row.get("place")
    cause = (
        f"{lasted_s / step_s:.0%} of the step is {row['operators']:,} small operators, {human(each_s, 's')} each with "
        "their backward: overhead, not arithmetic"
    )
    where = called_at(row.get("function"), place, None) if place else ""
    at_best = step_s - lasted_s + min(lasted_s, arithmetic_s)
    return Diagnosis(cause, REMEDY, step_s, at_best, evidence=({**row},), where=where, takes=lasted_s)


RULE = Rule(find)
