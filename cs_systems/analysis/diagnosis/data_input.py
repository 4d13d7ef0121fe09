"""Rule for waiting for data: the step cannot begin before its batch has been loaded."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import after
from cs_systems.analysis.diagnosis.own_python import FEWEST, named
from cs_systems.analysis.replay import InputRemoved
from cs_systems.config import Phase
from cs_systems.core.statistics import quantile

REMEDY = "raise the data loader's num_workers and prefetch_factor, or prepare the data in advance"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the phase `input` or the data loader takes; the same batch again shows what it would save."""
    step_s, waited_s = evidence.step_s, evidence.input_s
    if step_s is None or not waited_s or waited_s < _noise_s(evidence):
        return None
    cause = f"{waited_s / step_s:.0%} of the step waits for the next batch"
    row = {"phase": Phase.INPUT.value, "time_s": waited_s}
    expected = after(evidence, "same-batch")
    lines = (row for row in OWN_PYTHON.of(evidence.tables) if row["phase"] == Phase.INPUT and row["samples"] >= FEWEST)
    where = next((named(row) for row in lines if row["place"]), "")  # the dataset's, if the loop itself reads it
    return Diagnosis(
        cause,
        REMEDY,
        step_s,
        step_s - waited_s,
        evidence=(row,),
        where=where,
        expected=expected,
        takes=waited_s,
        change=InputRemoved(),
    )


def _noise_s(evidence: Evidence) -> float:
    """Return by how much the rest of a loop's step varies: half of the range of its middle 80%.

    Where other programs keep the machine busy, they slow down the workers of a data loader, too.
    """
    if evidence.measurement is None or not evidence.is_loop or evidence.has_mixed_steps:
        return 0.0
    rest_s = [s.wall_s - s.phases_s.get(Phase.INPUT, 0.0) for s in evidence.measurement.timed]
    return (quantile(rest_s, 0.9) - quantile(rest_s, 0.1)) / 2 if rest_s else 0.0


RULE = Rule(find)
