"""The tables of a recording for the record of the run that it is of: the same for every profiler."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from statistics import median

from cs_systems.analysis.profile import profile
from cs_systems.analysis.read import read
from cs_systems.analysis.tables import ALL, TABLES, Ceilings, Costs, notes
from cs_systems.analysis.trace import without_collector
from cs_systems.config import ConfigError
from cs_systems.cost import PhaseCost
from cs_systems.record import Caveat, Row, RunRecord


def tables(recording: Path, record: RunRecord) -> tuple[dict[str, list[Row]], tuple[Caveat, ...]]:
    """Every table of `analysis.tables`, `coverage`, and `notes`: {table, note}, what must be said under each.

    A recording without kernels (a CPU's) has no tables: a caveat says so, and the recording is kept.
    """
    try:
        with without_collector():
            seen = profile(read(recording))
            costs = costs_of(record)
            results = {name: table(seen, costs) for name, table in TABLES.items()}
    except ConfigError as error:
        return {}, (Caveat("no-tables", str(error), f"open {recording.name} in the profiler's own viewer"),)
    results["coverage"] = [
        {
            "profiler": seen.recording.profiler,
            "steps": len(seen.steps),
            "kernels": sum(kernels.calls for kernels in seen.by_step.values()),
            "kernel_s": seen.time_s,
            "phase_coverage": seen.phase_coverage,
            "layer_coverage": seen.layer_coverage,
        }
    ]
    said = [(name, note) for name in TABLES for note in notes(name, seen, results[name])]
    results["notes"] = [{"table": name, "note": note} for name, note in [*((None, n) for n in seen.notes), *said]]
    return results, ()


def costs_of(record: RunRecord) -> Costs:
    """What the record knows of each phase's cost, the device's ceilings, and the step's time by the device's events."""
    names = [f.name for f in fields(PhaseCost)]
    by_phase = {
        (row["phase"], ALL): PhaseCost(**{name: row[name] for name in names}) for row in record.results.get("cost", ())
    }
    ceilings = None
    for row in record.results.get("ceiling", ()):
        if row["peak_bytes_per_s"] is not None:
            ceilings = Ceilings(row["peak_flops_per_s"], row["peak_bytes_per_s"])
    timed = record.measurement.timed if record.measurement else ()
    on_device = record.measurement is not None and record.measurement.clock == "cuda_event"
    event_s = median(sum(s.phases_s.values()) for s in timed) if timed and on_device else None
    return Costs(by_phase, ceilings, event_s)
