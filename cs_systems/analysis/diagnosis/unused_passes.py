"""Rule for backward passes without an update: their gradients are cleared before an optimizer has used them."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import UNUSED_PASSES
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 6  # backward passes
NOTABLE = 0.5  # share of the backward passes; every second one may only measure gradients
REMEDY = (
    "where gradients accumulate, call zero_grad() only after optimizer.step(); else check the condition that skips "
    "the step, such as a limit of the gradients' norm (clip_grad_norm_ keeps the update); where gradients are only "
    "measured, use torch.autograd.grad"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find that most backward passes lead to no update; accumulated gradients count as used."""
    row = UNUSED_PASSES.first(evidence.tables)
    if row is None or row["passes"] < FEWEST or row["unused"] <= NOTABLE * row["passes"]:
        return None
    cause = (
        f"{row['unused']} of {row['passes']} backward passes that were looked at lead to no update: their gradients "
        "are cleared before an optimizer steps"
    )
    return of_training(cause, REMEDY, [row], row["unused"] / row["passes"])


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
