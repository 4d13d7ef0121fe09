"""Forecast of a measured cell's peak of memory with other fields, by formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.formulas.memory.fit import algorithm_of
from cs_systems.formulas.memory.model import step_memory

VALID = 0.1  # a formula with a larger relative error for the measured cell itself is not used


class Peak(NamedTuple):
    """Expected peak in bytes, and its range: the other end applies the formula's error on the measured cell."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """Forecast for a cell on its device, given its measured peak."""

    config: RunConfig
    peak_bytes: int

    def peak(self, **changes: Any) -> Peak | None:
        """Return the peak with these fields changed, or None if no formula is valid."""
        config = self.config
        if config.subject is not Subject.STEP or config.compile != "none" or config.strategy != RunConfig.strategy:
            return None
        try:
            error = self.peak_bytes / _peak_bytes(config)
            value = _peak_bytes(replace(config, **changes))
        except ConfigError:
            return None
        if abs(error - 1) > VALID:
            return None
        return Peak(value, min(value, value * error), max(value, value * error))


def _peak_bytes(config: RunConfig) -> int:
    return step_memory(config, algorithm_of(config)).peak_bytes
