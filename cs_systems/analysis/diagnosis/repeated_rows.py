"""Rule for gradients of rows that an index looks up again for each part of a batch, though all parts are equal."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import REPEATED_ROWS, RepeatedRowsRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.units import counted

NOTABLE = 0.1  # share of the step
REMEDY = (
    "look the rows up once, with one of the equal parts of the index ({}), and let the operators after it broadcast "
    "the result"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of the copies: their lookup, and the sum of their gradients."""
    rows, step_s = REPEATED_ROWS.of(evidence.tables), evidence.step_s
    if step_s is None or not rows:
        return None
    takes = min(step_s, sum(_lasted_s(row) * (1 - 1 / row["copies"]) for row in rows))
    if takes < NOTABLE * step_s:
        return None
    first = max(rows, key=_lasted_s)
    others = sum(row["lookups"] for row in rows) - 1
    more = f"; {counted(others, 'similar lookup')}" if others else ""
    of, lasted_s = first["tensor"] or "a tensor", sum(map(_lasted_s, rows))
    cause = (
        f"{takes / step_s:.0%} of the step is the backward of an index "
        f"({sum(row['backward_s'] for row in rows) / lasted_s:.0%}) and its lookup: the same rows of {of} "
        f"({first['shape']}) are looked up {first['copies']:,} times{more}"
    )
    remedy = REMEDY.format(first["index"])
    return Diagnosis(cause, remedy, step_s, takes=takes, evidence=tuple({**row} for row in rows))


def _lasted_s(row: RepeatedRowsRow) -> float:
    return row["forward_s"] + row["backward_s"]


RULE = Rule(find, refines=("small-operators",))
