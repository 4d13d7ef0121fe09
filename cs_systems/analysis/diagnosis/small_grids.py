"""Rule for small grids: kernels of a few blocks leave most multiprocessors of the GPU without work."""

from __future__ import annotations

import math

from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import human

FEW_BLOCKS = 8  # a GPU has at least 14 multiprocessors, and a block runs on one of them
LONG_S = 100e-6  # a shorter kernel is over before more blocks would help
DOMINANT = 0.3  # share of the step
REMEDY = "divide their work among more blocks, or run several of these kernels at once"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of long kernels of a few blocks; what more blocks would gain is not known."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    computing = [row for row in evidence.kernels() if row["family"] != "collective"]
    rows = [row for row in computing if _blocks(row.get("grid")) <= FEW_BLOCKS and row.get("mean_s", 0) > LONG_S]
    time_s = min(step_s, sum(row["time_s"] for row in rows))
    if not rows or time_s < DOMINANT * step_s:
        return None
    worst = max(rows, key=lambda row: row["time_s"])
    blocks = int(_blocks(worst["grid"]))
    cause = f"{time_s / step_s:.0%} of the step is kernels of few blocks, which leave most of the GPU idle"
    where = f"grid of {blocks} block{'s' * (blocks > 1)}, {human(worst['mean_s'], 's')} each: {worst['kernel'][:60]}"
    evidence_rows: tuple[Row, ...] = tuple({**row} for row in rows)
    return Diagnosis(cause, REMEDY, step_s, takes=time_s, evidence=evidence_rows, where=where)


def _blocks(grid: str | None) -> float:
    """Return the number of blocks of a grid written as `8×4×1`; infinite if it is unknown."""
    return math.prod(map(int, grid.split("×"))) if grid else math.inf


RULE = Rule(find, shortens_kernels=True)
