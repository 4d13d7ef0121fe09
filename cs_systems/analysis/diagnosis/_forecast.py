"""Expected peak of memory after a remedy that is a field of the cell."""

from __future__ import annotations

from typing import Any

from cs_systems.analysis.diagnosis._findings import Expected
from cs_systems.analysis.diagnosis._memory_use import MemoryUse


def expected(memory: MemoryUse, **changes: Any) -> Expected | None:
    """Return the peak that the formula gives with these fields changed; None where none is valid, as for a snapshot."""
    peak = memory.forecast.peak(**changes) if memory.forecast else None
    return Expected(*peak, how="forecast") if peak else None
