"""Rule for gradients that no optimizer uses: backward computes them for parameters that are not trained."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import DROPPED_GRADIENTS, UNUSED_GRADIENTS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.units import counted

REMEDY = (
    "call requires_grad_(False) on them, and run what is in front of the trained parameters under torch.no_grad(); or "
    "give them to the optimizer"
)

DETACH = "detach what comes from the other model (.detach()), or make it under torch.no_grad()"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find parameters with gradients that no optimizer holds; their share of backward follows from their size."""
    return _held_by_none(evidence) or _dropped(evidence)


def _dropped(evidence: Evidence) -> Diagnosis | None:
    """Find gradients for another optimizer than the one that steps, which are cleared: an input is not detached."""
    row, step_s = (
        max(DROPPED_GRADIENTS.of(evidence.tables), key=lambda each: each["share"], default=None),
        evidence.step_s,
    )
    if row is None or step_s is None:
        return None
    takes = min(step_s, row["share"] * (evidence.phase_s(Phase.BACKWARD.value) or 0.0))
    cause = (
        f"{row['passes']} of {row['of_passes']} backward passes also compute gradients of "
        f"{counted(row['parameters'], 'parameter')} of another optimizer ({row['optimizer']}), such as {row['first']}, "
        "and zero_grad clears them before it steps"
    )
    return Diagnosis(cause, DETACH, step_s, takes=takes, evidence=(row,), where=row.get("place") or "")


def _held_by_none(evidence: Evidence) -> Diagnosis | None:
    """Find parameters with gradients that no optimizer holds."""
    row, step_s = UNUSED_GRADIENTS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None:
        return None
    takes = min(step_s, row["share"] * (evidence.phase_s(Phase.BACKWARD.value) or 0.0))
    cause = (
        f"backward computes gradients of {counted(row['parameters'], 'parameter')} that no optimizer holds, such as "
        f"{row['first']}: {row['share']:.1%} of all elements with gradients"
    )
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=(row,))


RULE = Rule(find)
