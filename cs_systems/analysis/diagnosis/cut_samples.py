"""Rule for samples that send no gradient to an encoder, drawn with sample() in place of rsample()."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import CUT_SAMPLES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.analysis.diagnosis.own_python import called_at

FEWEST = 3  # steps
REMEDY = "draw with rsample() there, which keeps the gradient"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a sample in the loss from a distribution that only a divergence trains."""
    rows = [row for row in CUT_SAMPLES.of(evidence.tables) if row["steps"] >= FEWEST]
    if not rows:
        return None
    row = rows[0]
    where = called_at(row["function"], row["place"], None)
    user = f", which {row['user']} takes," if row["user"] else ""
    cause = (
        f"{row['module']} gets no gradient through the sample of its {row['distribution']}{user} and learns from "
        f"kl_divergence alone: {where} calls sample(), which cuts the gradient"
    )
    return of_training(cause, REMEDY, rows)


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
