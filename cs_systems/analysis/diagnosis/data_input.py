"""Rule for waiting for data: the step cannot begin before its batch has been loaded."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import after
from cs_systems.analysis.diagnosis.own_python import FEWEST, named
from cs_systems.analysis.replay import InputRemoved
from cs_systems.config import Phase

REMEDY = "raise the data loader's num_workers and prefetch_factor, or prepare the data in advance"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the phase `input` or the data loader takes; the same batch again shows what it would save."""
    step_s, waited_s = evidence.step_s, evidence.input_s
    if step_s is None or not waited_s:
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


RULE = Rule(find)
