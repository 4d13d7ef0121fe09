"""Data classes of predicted memory: bytes by component at each possible peak, and after each phase."""

from __future__ import annotations

from dataclasses import dataclass

Components = dict[str, int]


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes alive by component at each possible peak, and the largest single allocation (name, bytes)."""

    instants: dict[str, Components]
    largest_allocation: tuple[str, int]

    @property
    def peak_at(self) -> str:
        """Instant with the most bytes alive."""
        return max(self.instants, key=lambda instant: sum(self.instants[instant].values()))

    @property
    def components(self) -> Components:
        """Bytes alive at the peak, by component."""
        return self.instants[self.peak_at]

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes alive at the end of a phase, by component, and the phase's peak.

    `step` counts from 1; step 0 has one phase, `built`.
    """

    step: int
    phase: str
    components: Components
    peak_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return sum(self.components.values())
