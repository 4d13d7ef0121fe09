"""Rule for Python's garbage collector, which stops a loop while it looks for cycles."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import COLLECTIONS, OTHER
from cs_systems.analysis.diagnosis import Diagnosis, Rule, data_input
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at, started_collections
from cs_systems.config import Phase
from cs_systems.core.units import counted, human

FEWEST = 2  # steps with collections that take time; a single one counts as a slow step
CALLED = "leave out gc.collect(), or call it every 100th step"
AUTOMATIC = "call gc.freeze() when model and data exist, or gc.disable() and gc.collect() every 100th step"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the collector takes, unless an own function that takes time starts it."""
    row = COLLECTIONS.first(evidence.tables)
    if row is None or not row["total_s"] or (row["in_steps"] < FEWEST and not row.get("is_called")):
        return None
    if started_collections(evidence, OTHER) is not None:
        return None
    if started_collections(evidence, Phase.INPUT) is not None and data_input.find(evidence) is not None:
        return None
    place = row.get("place")
    where = called_at(row.get("function"), place, None) if place else ""
    called = bool(row.get("is_called"))
    cause = (
        f"{row['time_s'] / row['total_s']:.0%} of the loop is Python's garbage collector: "
        f"{counted(row['collections'], 'collection')}, the longest {human(row['longest_s'], 's')}"
    )
    return Diagnosis(
        cause,
        CALLED if called else AUTOMATIC,
        row["total_s"],
        row["total_s"] - row["time_s"],
        evidence=(row,),
        where=where if called else "",
    )


RULE = Rule(find, judges_loop=True)
