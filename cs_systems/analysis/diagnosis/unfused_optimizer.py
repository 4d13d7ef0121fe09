"""Rule for an unfused optimizer: a kernel per operation or parameter, instead of one for the whole update."""

from __future__ import annotations

import re
from typing import Literal

from cs_systems.analysis.attribution.gaps import LAUNCH
from cs_systems.analysis.attribution.phase_gaps import launch_waits_s
from cs_systems.analysis.comparison.loop_findings import COLLECTOR, FUSED_UPDATES, OWN_PYTHON
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Expected, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis.own_python import FEWEST, MOST, NOTABLE, named
from cs_systems.analysis.timing_caveats import launch_bound_phases
from cs_systems.config import Phase
from cs_systems.core.optimizers import OPTIMIZERS, USUAL, Form, optimizer
from cs_systems.core.tables import Row

FUSED = re.compile(r"fused_?(optimizer|adam|sgd|lamb)|^triton_for_|^adamw_kernel", re.IGNORECASE)
# AdamW reads parameter, gradient and both moments, and writes all but the gradient. torch's foreach AdamW moves these
# and its temporaries in eight operations: decay 2, first moment 3, second moment 2 + 3, root 2, division 2, epsilon 2,
# update 4.
FUSED_PASSES, FOREACH_PASSES = OPTIMIZERS[USUAL].update_bytes(1), 20
MOST_LONGER = 2.5  # times the optimizer's phase; a longer trial is not about the updates of this loop
ALIKE = 1.5  # times as long or short, at most, is a trial that measures the loop's own updates
UNSURE = 0.2  # share by which a step gains more or less than the trial
MANY = 100  # kernels of an update; a fused one has a few
OPTIONS = {"optimizer": (USUAL,)}
REMEDY = f"use a fused optimizer (torch.optim.AdamW(…, fused=True); --optimizer {USUAL})"

OF_LOOP = "use one of torch.optim with fused=True, or update all parameters in one call each (torch._foreach_add_ …)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of the optimizer, unless its kernels or its name show that it is fused.

    At best, the update takes the time of its minimal traffic, if known, else the fused share of its passes. Waits for
    its launches count if they are most of the step's waits, or if the timed update shows them.
    """
    step_s = evidence.step_s
    if step_s is not None and evidence.is_loop and (found := _written_in_python(evidence, step_s)) is not None:
        return found
    if step_s is not None and evidence.is_loop and (found := _tried(evidence, step_s)) is not None:
        return found
    if step_s is None or evidence.device_name is None or _is_fused(evidence):
        return None
    rows: list[Row] = evidence.rows_of("all", phases=(Phase.OPTIMIZER,))
    if not rows and evidence.busy_s is None and (time_s := evidence.phase_s(Phase.OPTIMIZER)):
        rows = [{"phase": Phase.OPTIMIZER.value, "time_s": time_s}]
    lasted_s = sum(row["time_s"] for row in rows)
    if not lasted_s:
        return None
    floor_s = evidence.floor_s(Phase.OPTIMIZER)
    least_s = lasted_s * FUSED_PASSES / FOREACH_PASSES if floor_s is None else min(floor_s, lasted_s)
    calls = round(sum(row.get("calls_per_step", 0) for row in rows))
    waits_s = _timed_waits_s(evidence, lasted_s, calls) or _waits_s(evidence, step_s)
    share = min(1.0, (lasted_s + waits_s) / step_s)
    cause = f"the optimizer takes {share:.0%} of the step, and its kernels are not fused"
    if waits_s:
        cause = f"the optimizer's {calls:,} kernels and the waits for their launches take {share:.0%} of the step"
    at_best = step_s - lasted_s - waits_s + least_s
    return Diagnosis(
        cause,
        REMEDY,
        step_s,
        at_best,
        evidence=tuple(rows),
        options=OPTIONS,
        unprofiled=_bounded(evidence.unprofiled_s, at_best) if waits_s else None,
        refines=("launch-bound",) if waits_s else (),
    )


def _timed_waits_s(evidence: Evidence, lasted_s: float, calls: int) -> float:
    """Return the time of the timed update beyond its kernels, if their launches limit it; 0 if they do not.

    lasted_s: the time of the update's kernels.
    """
    m = evidence.measurement
    if (
        evidence.busy_s is None
        or calls < MANY
        or m is None
        or not launch_bound_phases(m, {Phase.OPTIMIZER} & {*m.phase_names()})
    ):
        return 0.0
    return max(0.0, evidence.phases_s(Phase.OPTIMIZER) - lasted_s)


def _waits_s(evidence: Evidence, step_s: float) -> float:
    """Return the time in which the GPU waits for launches of the optimizer, if these are most of the step's waits.

    It is 0 if the profiler's own cost per launch explains the waits.
    """
    idle_s = evidence.idle_s.get(LAUNCH)
    if idle_s is None or evidence.usual is None or evidence.clean_s is not None:
        return 0.0
    of_profiler_s = step_s - evidence.unprofiled_s[1] if evidence.unprofiled_s else 0.0
    if idle_s - of_profiler_s <= WORTH * step_s:
        return 0.0
    waits_s = launch_waits_s(evidence.usual.profile, Phase.OPTIMIZER)
    return waits_s if waits_s > MOSTLY * idle_s else 0.0


def _bounded(unprofiled: tuple[float, float] | None, least_s: float) -> tuple[float, float] | None:
    """Return the range of the duration without the profiler, raised to at least `least_s`."""
    return (max(least_s, unprofiled[0]), max(least_s, unprofiled[1])) if unprofiled else None


def _written_in_python(evidence: Evidence, step_s: float) -> Diagnosis | None:
    """Return the time of an optimizer step written in Python, which runs one operator at a time."""
    rows = [row for row in OWN_PYTHON.of(evidence.tables) if row["phase"] == Phase.OPTIMIZER]
    # a line that calls the step of another optimizer does not belong to an optimizer
    rows = [r for r in rows if r["samples"] >= FEWEST and r["function"] not in ("", COLLECTOR)]
    rows = [r for r in rows if not (r.get("calls") or "").endswith("step")]
    lasted_s = min(sum(row["time_s"] for row in rows), evidence.phase_s(Phase.OPTIMIZER) or 0.0)
    if lasted_s < NOTABLE * step_s:
        return None
    lines = ", ".join(f"{named(row)} ({row['time_s'] / step_s:.0%})" for row in rows[:MOST])
    cause = f"{lasted_s / step_s:.0%} of the step is an optimizer in the script's own Python: {lines}"
    return Diagnosis(cause, OF_LOOP, step_s, step_s - lasted_s, evidence=tuple({**row} for row in rows))


def _tried(evidence: Evidence, step_s: float) -> Diagnosis | None:
    """Return the time of torch's optimizers on a CPU for which fused updates of copies took less.

    The trial may not fit the loop. Where the program compiles its updates, these are shorter than those of copies.
    Where the loop's parameters are not in the caches, they are longer, so that the gain lies between the trial's and
    the whole phase. Other work in the phase, such as other optimizers or hooks, leaves the trial's gain.
    """
    every = FUSED_UPDATES.of(evidence.tables)
    rows = [row for row in every if row["high_share"] < 1]
    tried_s = sum(row["updates"] * row["time_s"] for row in rows)
    phase_s = min(step_s, evidence.phases_s(Phase.OPTIMIZER))
    if not rows or not tried_s or tried_s > MOST_LONGER * phase_s:
        return None
    fused_share, low_share, high_share = (
        sum(row["updates"] * row["time_s"] * row[name] for row in rows) / tried_s
        for name in ("fused_share", "low_share", "high_share")
    )
    is_whole = len(rows) == len(every) and not any(row.get("others") for row in rows)
    is_complete = is_whole and all(row["tried"] == row["parameters"] for row in rows)
    is_alike = is_complete and phase_s <= ALIKE * tried_s and tried_s <= ALIKE * phase_s
    lasted_s = phase_s if is_whole else min(phase_s, tried_s)
    saved_s = lasted_s * (1 - fused_share)
    least_s = (min(phase_s, tried_s) - tried_s * high_share) * (1 - UNSURE)
    most_s = min(phase_s, lasted_s * (1 - low_share) * (1 + UNSURE)) if is_alike else phase_s
    if saved_s < NOTABLE * step_s or least_s < WORTH * step_s:
        return None
    names = " and ".join(dict.fromkeys(row["optimizer"] for row in rows))
    parameters = sum(row["parameters"] for row in rows)
    cause = (
        f"{lasted_s / step_s:.0%} of the step is the optimizer, {names} with several operators for each of "
        f"{parameters:,} parameters; fused updates of copies took {fused_share:.0%} of the time"
    )
    instead = " in place of foreach=True" if any(row.get("is_foreach") for row in rows) else ""
    remedy = f"pass fused=True{instead} to torch.optim.{names.replace(' and ', ' and torch.optim.')}"
    how: Literal["measured", "forecast"] = "measured" if is_alike else "forecast"
    expected = Expected(step_s - saved_s, step_s - most_s, step_s - least_s, how)
    return Diagnosis(cause, remedy, step_s, evidence=tuple({**row} for row in rows), expected=expected)


def _is_fused(evidence: Evidence) -> bool:
    """Return whether the optimizer is fused; True if unknown."""
    if evidence.kernels():
        return any(FUSED.search(row["kernel"]) for row in evidence.kernels())
    form = optimizer(str(evidence.setting("optimizer"))).form
    return form is None or form is Form.FUSED


RULE = Rule(find)
