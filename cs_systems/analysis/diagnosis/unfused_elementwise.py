"""Rule for unfused elementwise kernels: each accesses memory for a few operations that a compiler would fuse."""

from __future__ import annotations

from cs_systems.analysis.attribution.fusable import FAMILIES
from cs_systems.analysis.attribution.tables import fusable
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._remedies import COMPILED
from cs_systems.analysis.diagnosis.precision_casts import casts
from cs_systems.analysis.diagnosis.unfused_attention import over_scores
from cs_systems.config import Phase
from cs_systems.core.statistics import ROUNDING_S

# Share of the kernels' time. Below it a compiler gains nothing that can be seen: where runs would save 5%, it saved
# less than 1% on one H200, as it does not fuse neighbours that do not use each other's results.
LEAST_SAVED = 0.08
ALONE = 0.95  # share of the kernels' time
REMEDY = "compile (torch.compile; --compile), which fuses them"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of elementwise kernels, casts and norms outside the optimizer, if nothing was compiled.

    Kernels that `unfused_attention` or `precision_casts` reports are left out.
    """
    step_s = evidence.step_s
    if step_s is None or evidence.has_compiled_kernels:
        return None
    rows = evidence.rows_of(*FAMILIES, without=(Phase.OPTIMIZER,)) if evidence.mostly_torch(FAMILIES) else []
    if _are_one(evidence) or not _can_be_fused(evidence):
        return None
    named = [row for row in (*over_scores(evidence), *casts(evidence)) if row["family"] in FAMILIES] if rows else []
    lost_s = sum(row["time_s"] for row in rows) - sum(row["time_s"] for row in named)
    if lost_s <= ROUNDING_S:
        return None
    calls = sum(row["calls_per_step"] for row in rows) - sum(row["calls_per_step"] for row in named)
    kernels = "kernel" if round(calls) == 1 else "kernels"
    cause = f"{calls:,.0f} elementwise {kernels}, casts and norms take {lost_s / step_s:.0%} of the step"
    # a compiler also removes host time between the kernels
    at_best = max(0.0, (step_s if evidence.busy_s is None else evidence.busy_s) - lost_s)
    at_best = at_best if at_best > ROUNDING_S else 0.0
    return Diagnosis(cause, REMEDY, step_s, at_best, evidence=tuple(rows), takes=lost_s, options=COMPILED)


def _can_be_fused(evidence: Evidence) -> bool:
    """Return whether the kernels follow each other in runs that are worth fusing; True if their order is unknown."""
    if "kernels" not in evidence.tables or "fusable" not in evidence.tables:
        return True
    runs = fusable.first(evidence.tables)
    return runs is not None and runs["saved_s"] >= LEAST_SAVED * sum(row["time_s"] for row in evidence.kernels())


def _are_one(evidence: Evidence) -> bool:
    """Return whether one elementwise kernel is nearly all that runs, so that there is nothing to fuse it with."""
    times = [(row["time_s"], row["family"]) for row in evidence.kernels()]
    longest_s, of_family = max(times, default=(0.0, ""))
    return of_family in FAMILIES and longest_s >= ALONE * sum(time_s for time_s, _ in times) > 0


RULE = Rule(find, shortens_kernels=True)
