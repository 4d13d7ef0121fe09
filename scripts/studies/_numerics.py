"""Table that the studies of low precision share."""

from __future__ import annotations

from collections.abc import Sequence

from _cells import Cell
from _study import row_table


def not_measured(cells: Sequence[Cell], format: str) -> list[str]:
    """Return a table of the cells without a result; no table if every cell has one."""
    missing = [cell for cell in cells if not cell.measured]
    rows = [{"cell": c.label(), "status": c.record.status, "reason": c.record.reason} for c in missing]
    return row_table(rows, "not measured", format)
