"""Expected peak of memory after a remedy that is a field of the cell."""

from __future__ import annotations

from typing import Any

from cs_systems.analysis.diagnosis._findings import Expected
from cs_systems.analysis.diagnosis._memory_use import MemoryUse


def expected(memory: MemoryUse, **changes: Any) -> Expected | None:
    """Return the peak by formula with these fields changed; None if no formula applies, as for a snapshot."""
    peak = memory.forecast.peak(**changes) if memory.forecast else None
    return Expected(*peak, how="forecast") if peak else None
