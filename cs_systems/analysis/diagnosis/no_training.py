"""Rule for a loop that trains nothing: its loss is NaN or infinite, or a GradScaler skips every optimizer step."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OUTCOME
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.caveats import scale_in_words

NOTABLE = 0.5  # share of the optimizer steps that are skipped
NO_NUMBER = "lower the learning rate, or use a precision with a larger range"
SKIPPED = "set a lower init_scale of the GradScaler, or use bf16 without one"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a loss that is NaN or infinite, or skipped steps: the times of such a loop are not a training's."""
    row = OUTCOME.first(evidence.tables)
    if row is None:
        return None
    fault, skipped, steps = row.get("fault"), row.get("skipped_steps"), row.get("optimizer_steps")
    if fault:
        cause = f"the loss is {fault} after the timed steps, so that no time of this loop is that of a training"
        return of_training(cause, NO_NUMBER, [row])
    if not steps or skipped is None or skipped < NOTABLE * steps:
        return None
    first, last = (scale_in_words(scale) for scale in (row.get("first_scale"), row.get("last_scale")))
    scales = f" (scale {first} at first, {last} at last)" if first and last else ""
    count = "all" if skipped == steps else f"{skipped} of"
    cause = f"the GradScaler skips {count} {steps} optimizer steps{scales}, so that the loop trains nothing"
    if skipped < steps:
        cause = cause.removesuffix(", so that the loop trains nothing")
    return of_training(cause, SKIPPED, [row])


RULE = Rule(find, judges_loop=True)
