"""Rule for a loop that grows from step to step: its memory, or the time of its steps."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import GROWTH, GrowthRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import human

GRAPH = "keep numbers in place of tensors with their graph: .item() or .detach()"
HOLDER = "keep fewer of them, or write them to a file"
MEMORY = "find what is kept from step to step, such as losses with their graph, outputs or a cache without a limit"
TIME = "find what each step does for all steps before it, such as reading a list that grows"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the quantity with the largest growth; memory, which ends the program, comes first."""
    rows = GROWTH.of(evidence.tables)
    memory = [row for row in rows if row["quantity"] != "step time"]
    if memory:
        return _of_memory(max(memory, key=lambda row: row["last"] - row["first"]))
    return next(map(_of_time, rows), None)


def _of_memory(row: GrowthRow) -> Diagnosis:
    grown, name = row["last"] - row["first"], row.get("kept")
    cause = (
        f"{row['quantity']} grows by {human(row['per_step'], 'bytes')} a step: {human(grown, 'bytes')} in "
        f"{row['steps']} steps"
    )
    if not name:
        return Diagnosis(cause, MEMORY, row["last"], unit="bytes", takes=grown, evidence=(row,))
    what, has_graph = row.get("kept_tensors") or "objects", "graph" in (row.get("kept_tensors") or "")
    where = f" at {row['place']}" if row.get("place") else ""
    cause += f"; {name} keeps {what}{where}" if what.startswith("a ") else f"; {what} are kept in {name}{where}"
    return Diagnosis(cause, GRAPH if has_graph else HOLDER, row["last"], unit="bytes", takes=grown, evidence=(row,))


def _of_time(row: GrowthRow) -> Diagnosis:
    first, last = row["first"], row["last"]
    phase = f", most of it in {row['phase']}" if row.get("phase") else ""
    cause = (
        f"a step takes {human(row['per_step'], 's')} longer with each step: {human(first, 's')} at first, "
        f"{human(last, 's')} after {row['steps']} steps{phase}"
    )
    return Diagnosis(cause, TIME, last, takes=last - first, evidence=(row,))


RULE = Rule(find, judges_loop=True)
