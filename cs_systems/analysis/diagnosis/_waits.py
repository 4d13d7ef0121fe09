"""Functions that prepare batches and wait for the GPU many times in a step, from samples of the stack and a trace."""

from __future__ import annotations

from typing import NamedTuple

from cs_systems.analysis.attribution.tables import waits
from cs_systems.analysis.comparison.loop_findings import HOST_SYNC, OTHER, OWN_PYTHON, OwnPythonRow
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.timing_caveats import launch_bound_phases

FEWEST = 100  # waits of a step
NEARLY_ALL = 0.9  # of the waits' time
FEWEST_SAMPLES = 10  # of the stack
_READS = {"aten::item": ".item()", "aten::_local_scalar_dense": ".item()", "aten::is_nonzero": "bool()"}


class Waiting(NamedTuple):
    """Function that prepares batches: its waits in a step, how it waits, its rows, and its time with the waits."""

    waits: int
    how: str
    rows: tuple[OwnPythonRow, ...]
    time_s: float


def waiting_preparation(evidence: Evidence) -> Waiting | None:
    """Return the function with nearly all waits of a step, if its results become the model's input.

    The waits count where the GPU is idle in them, and where the calls of one kind and place hold nearly all their time.
    """
    measurement = evidence.measurement
    if not evidence.is_loop or measurement is None or HOST_SYNC not in launch_bound_phases(measurement):
        return None
    places = [row for row in waits.of(evidence.tables) if (row["within"] or "").endswith(HOST_SYNC)]
    own = OWN_PYTHON.of(evidence.tables)
    waiting = next((row for row in own if row["phase"] == HOST_SYNC and row["share"] >= NEARLY_ALL), None)
    if not places or waiting is None or not waiting["function"] or waiting["samples"] < FEWEST_SAMPLES:
        return None
    of = waiting["function"], waiting["place"].partition(":")[0]
    alike = [
        row
        for row in own
        if row["phase"] == OTHER and row.get("feeds_model") and (row["function"], row["place"].partition(":")[0]) == of
    ]
    if not alike:
        return None
    # A call that waits often and briefly tells nothing about one that waits for long.
    most = max(places, key=lambda row: row["calls_per_step"])
    count = round(most["calls_per_step"])
    if count < FEWEST or most["time_s"] < NEARLY_ALL * sum(row["time_s"] for row in places):
        return None
    how = _READS.get((most["within"] or "").partition(" in ")[0], "reads of values")
    rows = (waiting, *alike)
    return Waiting(count, how, rows, sum(row["time_s"] for row in rows))
