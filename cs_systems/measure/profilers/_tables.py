"""Tables made from a trace, for the record of the traced run; shared by all tracing profilers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.tables import ALL, Ceilings, Costs
from cs_systems.analysis.attribution.timeline import COVERAGE, NOTES, OVERHEAD, CoverageRow, OverheadRow
from cs_systems.analysis.attribution.timeline import results as analysis_results
from cs_systems.analysis.diagnosis._recorded import what_ifs
from cs_systems.analysis.replay import replayed
from cs_systems.analysis.replay.what_ifs import what_if
from cs_systems.config import MARKED_COMPILE_MODES, ConfigError
from cs_systems.core.caveats import RECORD_AGAIN, Caveat
from cs_systems.core.tables import Row, Tables
from cs_systems.formulas.cost import COST, PhaseCost
from cs_systems.formulas.peaks import CEILING
from cs_systems.measure.profilers import Collected
from cs_systems.readers import read
from cs_systems.readers.forms.modules import checked
from cs_systems.readers.forms.trace import Trace
from cs_systems.record import RunRecord

UNMARKED = (
    "in this compile mode the model runs as one function without ranges: its kernels have a phase, but no layer or "
    "part; use the compile mode default, or none, to see layers"
)
FUSED = (
    "{:.1%} of the kernel time is in kernels that are fused over several layers: each belongs to the layer with most "
    "of its operators"
)


def tables(trace: Path, record: RunRecord) -> Collected:
    """Return every table of `attribution.tables`, and `coverage`, `overhead`, `notes`, and the profile for a page.

    A trace without kernels (a CPU's) gives `overhead`, `ranges` and `operators`, and a caveat that states this.
    """
    cost = OVERHEAD.filled(overhead(record))
    remedy = f"open {trace.name} in the profiler's own viewer"
    try:
        seen = profile(_with_modules(read(trace), record))
    except ConfigError as error:
        return Collected(results=cost, warnings=(Caveat("no-tables", str(error), remedy),))
    results = {**analysis_results(seen, costs_of(record, families_by_phase(seen))), **cost}
    replay = cache(partial(replayed, seen))  # takes seconds: the tables and the page share one
    if not seen.trace.kernels:
        lacks = f"{trace.name} holds no kernel: it has times of the ranges on the host, but none of the device"
        few: Tables = {name: results[name] for name in ("overhead", "ranges", "operators") if name in results}
        remedy = f"or see its operators: cs-systems analyze {trace}" if "operators" in results else ""
        caveat = Caveat("no-tables", lacks, ", ".join(filter(None, ("profile on a GPU", remedy))))
        return Collected({}, few, (caveat,), profile=(seen, results, replay))
    coverage: CoverageRow = {
        "profiler": seen.trace.profiler,
        "steps": len(seen.steps),
        "kernels": sum(kernels.calls for kernels in seen.by_step.values()),
        "kernel_s": seen.time_s,
        "phase_coverage": seen.phase_coverage,
        "layer_coverage": seen.layer_coverage,
        "fused_share": seen.fused_share,
    }
    results |= COVERAGE.filled([coverage])
    if record.run_config.compile != "none":
        meant = FUSED.format(seen.fused_share) if record.run_config.compile in MARKED_COMPILE_MODES else UNMARKED
        results |= NOTES.filled([*NOTES.of(results), {"table": "layers", "note": meant}])
    results |= what_if.filled(what_ifs(replace(record, results={**record.results, **results}), replay))
    doubts = (Caveat("incomplete-trace", seen.incomplete, RECORD_AGAIN),) if seen.incomplete else ()
    return Collected({}, results, doubts, profile=(seen, results, replay))


def _with_modules(trace: Trace, record: RunRecord) -> Trace:
    """Return the trace with the record's modules if it has none itself."""
    known = trace.modules or checked(record.results.get("modules"))
    return replace(trace, modules=known)


def overhead(record: RunRecord) -> list[OverheadRow]:
    """Return the cost of profiling: recorded steps compared with the last steps before recording in the same process.

    Empty if nothing was measured.
    """
    if record.measurement is None:
        return []
    recorded_s = median(sample.wall_s for sample in record.measurement.timed)
    before_s = record.clean.median_s() if record.clean else None
    return [
        {
            "recorded_s": recorded_s,
            "not_recorded_s": before_s,
            "recorded_to_not_recorded": None if before_s is None else recorded_s / before_s,
        }
    ]


def families_by_phase(seen: Profile) -> dict[str, set[str]]:
    """Return a map from phase to the families of its kernels."""
    found: dict[str, set[str]] = defaultdict(set)
    for function, place in seen.groups:
        found[place.phase].add(family(function.name))
    return found


def costs_of(record: RunRecord, families: Mapping[str, Set[str]]) -> Costs:
    """Return each phase's cost from the record, the device's ceilings, and the step's time by the device's events."""
    by_phase: dict[tuple[str, str], PhaseCost] = {}
    for row in COST.of(record.results):
        known: Row = row
        phase, cost = row["phase"], PhaseCost(**{f.name: known.get(f.name) for f in fields(PhaseCost)})
        by_phase[phase, ALL] = cost
        by_phase |= {(phase, name): share for name, share in _by_family(cost, families.get(phase, set())).items()}
    ceilings = None
    for peak in CEILING.of(record.results):
        if peak["peak_bytes_per_s"] is not None:
            ceilings = Ceilings(peak["peak_flops_per_s"], peak["peak_bytes_per_s"])
    timed = record.measurement.timed if record.measurement else ()
    on_device = record.measurement is not None and record.measurement.clock == "cuda_event"
    event_s = median(sum(s.phases_s.values()) for s in timed) if timed and on_device else None
    return Costs(by_phase, ceilings, event_s, {row["path"]: row for row in record.results.get("modules", ())})


def _by_family(cost: PhaseCost, families: Set[str]) -> dict[str, PhaseCost]:
    """Return a map from family to its share of a phase's cost, if the formulas attribute it to kernels that ran.

    All FLOPs come from matrix products; if there are FLOPs, the bytes do too. The products over the score matrix belong
    to the attention kernels if some ran, else to matrix products. The bytes that AdamW moves belong to its kernels.
    """
    if not cost.hardware_flops:
        return {"optimizer": cost} if cost.hardware_flops == 0 and "optimizer" in families else {}
    if None in (cost.score_flops, cost.score_bytes, cost.bytes):
        return {}
    scores = PhaseCost(None, cost.score_flops, cost.score_bytes)
    rest = PhaseCost(None, cost.hardware_flops - (cost.score_flops or 0), (cost.bytes or 0) - (cost.score_bytes or 0))
    shares = {"attention": scores, "matmul": rest} if "attention" in families else {"matmul": cost}
    return {name: share for name, share in shares.items() if share.hardware_flops}
