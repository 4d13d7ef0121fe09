"""Table of the energy of the timed steps, from a device's counter of joules, and rates computed from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from cs_systems.core.statistics import total
from cs_systems.core.tables import Table


class EnergyRow(TypedDict):
    """Energy of all timed steps together, including the time between them, such as the preparation of a batch."""

    source: str  # "nvml": the whole GPU board; "rapl": the packages of all CPUs
    steps: int
    window_s: float  # seconds from the start of the first timed step to the end of the last
    energy_j: float | None  # None if the window is too short for the counter
    idle_w: float | None  # power before the first step, with no work on the device; None if it had work, or is unknown


ENERGY = Table("energy", EnergyRow, "energy of the timed steps")


def step_j(row: EnergyRow) -> float | None:
    """Return the energy of a step."""
    return None if row["energy_j"] is None or not row["steps"] else row["energy_j"] / row["steps"]


def mean_w(row: EnergyRow) -> float | None:
    """Return the mean power during the timed steps."""
    return None if row["energy_j"] is None or not row["window_s"] else row["energy_j"] / row["window_s"]


def idle_step_j(row: EnergyRow) -> float | None:
    """Return the energy that the idle device would have taken in the time of a step."""
    idle_w = row["idle_w"]
    return None if idle_w is None or not row["steps"] else idle_w * row["window_s"] / row["steps"]


def of_steps(rows: Iterable[EnergyRow], durations_s: Sequence[float]) -> list[EnergyRow]:
    """Return the rows for consecutive steps without a gap, in a window measured by the host's clock.

    The device may be behind the host at both ends, so the mean power of the window is multiplied by the steps'
    durations.
    """
    steps_s = sum(durations_s)
    return [
        {**row, "window_s": steps_s, "energy_j": None if (w := mean_w(row)) is None else w * steps_s} for row in rows
    ]


def joined(rows: Iterable[EnergyRow], *, at_once: bool) -> list[EnergyRow]:
    """Return one row for several windows: consecutive ones, or simultaneous ones of the devices of several ranks."""
    rows = list(rows)
    if not rows:
        return []
    first = rows[0]
    idle_w = [row["idle_w"] for row in rows]
    return [
        {
            "source": first["source"],
            "steps": first["steps"] if at_once else sum(row["steps"] for row in rows),
            "window_s": max(row["window_s"] for row in rows) if at_once else sum(row["window_s"] for row in rows),
            "energy_j": total(row["energy_j"] for row in rows),
            "idle_w": total(idle_w) if at_once else first["idle_w"],
        }
    ]
