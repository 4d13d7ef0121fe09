"""Rule for gradients that no optimizer uses: backward computes them for parameters that are not trained."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import DROPPED_GRADIENTS, UNUSED_GRADIENTS
from cs_systems.analysis.comparison.loop_ranks import COLLECTIVES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.tables import Row
from cs_systems.core.units import counted

REMEDY = (
    "call requires_grad_(False) on them, and run what is in front of the trained parameters under torch.no_grad(); or "
    "give them to the optimizer"
)

DETACH = "detach what comes from the other model (.detach()), or make it under torch.no_grad()"

FREEZE = (
    "for the forward and backward of these passes call requires_grad_(False) on that model, and call the module inside "
    "DistributedDataParallel (model.module)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find gradients that no optimizer uses; their share of backward follows from the sizes of tensors."""
    found, step_s = _held_by_none(evidence) or _dropped(evidence), evidence.step_s
    if found is None or step_s is None:
        return None
    row, cause, remedy = found
    backward_s = evidence.phase_s(Phase.BACKWARD.value) or 0.0
    reduces_s = 0.0
    if row.get("reduced_share"):
        shares = (each["share"] for each in COLLECTIVES.of(evidence.tables) if each["are_gradients"])
        reduces_s = min(backward_s, step_s * sum(shares))
    takes = row["share"] * (backward_s - reduces_s) + row.get("reduced_share", 0.0) * reduces_s
    takes = min(step_s, takes)
    precedes = ("exposed-communication",) if reduces_s else ()  # a part of it is of these gradients
    where = row.get("place") or ""
    return Diagnosis(cause, remedy, step_s, takes=takes, evidence=(row,), where=where, precedes=precedes)


def _held_by_none(evidence: Evidence) -> tuple[Row, str, str] | None:
    """Return the row of parameters with gradients that no optimizer holds, the cause, and the remedy."""
    row = UNUSED_GRADIENTS.first(evidence.tables)
    if row is None:
        return None
    cause = (
        f"backward computes gradients of {counted(row['parameters'], 'parameter')} that no optimizer holds, such as "
        f"{row['first']}: {row['share']:.1%} of all elements with gradients"
    )
    return {**row}, cause, REMEDY


def _dropped(evidence: Evidence) -> tuple[Row, str, str] | None:
    """Return the same of gradients for another optimizer than the one that steps, which are cleared.

    Their cause is an input that is not detached, or, if the ranks reduce them, a model through which a pass goes.
    """
    row = max(DROPPED_GRADIENTS.of(evidence.tables), key=lambda each: each["share"], default=None)
    if row is None:
        return None
    cause = (
        f"{row['passes']} of {row['of_passes']} backward passes also compute gradients of "
        f"{counted(row['parameters'], 'parameter')} of another optimizer ({row['optimizer']}), such as {row['first']}, "
        "and zero_grad clears them before it steps"
    )
    if row.get("reduced_share"):
        cause = cause.replace("also compute", "also compute and reduce")
        return {**row}, cause, FREEZE
    return {**row}, cause, DETACH


RULE = Rule(find)
