"""Rule for backward passes that go through the same operators again, because each loss has a pass of its own."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import REPEATED_BACKWARD, SAME_DERIVATIVES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase

NOTABLE = 0.5  # share of the observed steps
REMEDY = (
    "add the losses and call backward once, without retain_graph: the gradients are the same, unless the program reads "
    "them between the passes"
)
REFINED = ("unfused-elementwise", "launch-bound", "small-operators")  # fewer operators remain
AT_ONCE = (
    "call it once for each output, with all inputs together, such as torch.autograd.grad(u.sum(), (x, t), "
    "create_graph=True), and take every derivative from its results"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find operators that several passes before one update compute again."""
    found = [one for one in (_of_losses(evidence), _of_derivatives(evidence)) if one is not None]
    return max(found, key=lambda one: one.takes or 0.0, default=None)


def _of_derivatives(evidence: Evidence) -> Diagnosis | None:
    """Find calls of autograd.grad that differentiate the same outputs again."""
    row, step_s = SAME_DERIVATIVES.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["steps"] < NOTABLE * row["of_steps"]:
        return None
    takes = min(step_s, row["share"] * evidence.phases_s(Phase.BACKWARD))
    again = f"{row['again']:.0f}"
    differentiate = "differentiates" if again == "1" else "differentiate"
    cause = (
        f"{again} of the {row['calls']:.0f} calls of autograd.grad in a step {differentiate} the same outputs again: "
        f"about {row['share']:.0%} of the work of backward is repeated, {takes / step_s:.0%} of the step"
    )
    place = row.get("place") or ""
    return Diagnosis(cause, AT_ONCE, step_s, takes=takes, evidence=(row,), where=place, refines=REFINED)


def _of_losses(evidence: Evidence) -> Diagnosis | None:
    """Find passes for losses that could be added; their gradients add up."""
    row, step_s = REPEATED_BACKWARD.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["steps"] < NOTABLE * row["of_steps"]:
        return None
    takes = min(step_s, row["share"] * evidence.phases_s(Phase.BACKWARD))
    cause = (
        f"{row['passes']:.0f} backward passes of a step go through the same part of the graph: about "
        f"{row['share']:.0%} of their work is repeated, {takes / step_s:.0%} of the step"
    )
    return Diagnosis(cause, REMEDY, step_s, takes=takes, evidence=(row,), where=row.get("place") or "")


RULE = Rule(find, precedes=("small-operators",))
