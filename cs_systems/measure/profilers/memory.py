"""Memory after each phase of each recorded step, measured and by the closed form, and device memory by owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from cs_systems.formulas.memory import tables
from cs_systems.formulas.memory.fit import known_by_formula
from cs_systems.formulas.memory.model import PhaseMemory, phase_memory
from cs_systems.measure.profilers import Collected, Profiler
from cs_systems.measure.profilers._readings import leave, take
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


class Readings(TypedDict):
    """Readings of the recorded steps, and of the device after them."""

    phases: list[tables.MemoryReading]
    parts: list[tables.MemoryPartRow]


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    from cs_systems.instrument.annotate import listening
    from cs_systems.instrument.memory_readings import MemoryReadings, parts_of_used_memory

    readings = MemoryReadings(device)
    try:
        with listening(readings):
            yield
    finally:
        leave(out, Readings(phases=readings.rows, parts=parts_of_used_memory(device)))


def collect(out: Path, record: RunRecord) -> Collected:
    found: Readings = take(out, "the readings of memory were not written")
    predicted = closed_form(record) or by_fake_tensors(record)
    phases = [_with_prediction(row, predicted, record.run_config.warmup) for row in found["phases"]]
    parts = tables.MEMORY_PARTS.filled(found["parts"]) if found["parts"] else {}
    return Collected(
        {}, {**tables.MEMORY_PHASES.filled(phases), **tables.MEMORY_COMPONENTS.filled(components(predicted)), **parts}
    )


def closed_form(record: RunRecord) -> list[PhaseMemory]:
    """Return each phase's memory by formula, on the record's device.

    Empty if no formula applies (`known_by_formula`).
    """
    known = known_by_formula(record)
    return [] if known is None else phase_memory(*known)


def by_fake_tensors(record: RunRecord) -> list[PhaseMemory]:
    """Return each phase's memory predicted by the step on fake tensors; empty without a prediction."""
    components: dict[tuple[int, str], dict[str, int]] = {}
    peaks: Counter[tuple[int, str]] = Counter()
    for row in tables.MEMORY_FORECAST.of(record.results):
        place = row["step"], row["phase"]
        components.setdefault(place, {})[row["component"]] = row["bytes"]
        peaks[place] += row["peak_bytes"]
    return [PhaseMemory(*place, found, peaks[place]) for place, found in components.items()]


def components(predicted: list[PhaseMemory]) -> list[tables.MemoryComponentRow]:
    """Return the closed form's bytes by component after each phase."""
    return [
        {"step": phase.step, "phase": phase.phase, "component": component, "bytes": size}
        for phase in predicted
        for component, size in phase.components.items()
    ]


def _with_prediction(row: tables.MemoryReading, predicted: list[PhaseMemory], warmup: int) -> tables.MemoryPhaseRow:
    """Return the row with the closed form's bytes."""
    step = row["step"] + (warmup if row["step"] else 0)
    like = {(p.step, p.phase): p for p in predicted}.get((min(step, 2), row["phase"]))
    peak = like.peak_bytes if like and row["step"] else None
    measured = row["peak_allocated_bytes"]
    return {
        **row,
        "step": step,
        "predicted_allocated_bytes": like.allocated_bytes if like else None,
        "predicted_peak_bytes": peak,
        "residual_bytes": None if measured is None or peak is None else measured - peak,
    }


PROFILER = Profiler(region=region, collect=collect, measures="memory", sees_oom=True, forecasts=True)
