"""Rule for an optimizer that changes no weight, or to which no gradient comes."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import NEVER_STEPPED, OUTCOME, UNUSED_GRADIENTS, UPDATES, UpdatesRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training
from cs_systems.core.units import counted

FEWEST = 3  # steps; a learning rate that begins at 0 may affect only the first
FEWEST_PASSES = 10  # without any step; an accumulation may have some
HALF = ("bfloat16", "float16")
CLEARED = "call optimizer.zero_grad() before the backward pass or after optimizer.step(), and not between the two"
OTHERS = "make the optimizer from the parameters of the model that is trained, after copying, wrapping or moving it"
MISSING = "find what separates them from the loss: detach(), torch.no_grad(), requires_grad, or another model's output"
ZERO = "find what multiplies the loss by 0, clamps it, or saturates"
RATE = "set the lr of the optimizer's param_groups, and check the scheduler that sets it"
ROUNDED = "keep the weights in float32 and compute under torch.autocast"
STEP = "call optimizer.step() after the backward passes, also for the last, shorter accumulation"
UNKNOWN = "find what restores the weights after optimizer.step(), or makes the updates too small"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer with parameters that are all the same before and after the timed steps, and the reason."""
    if (never := _never_stepped(evidence)) is not None:
        return never
    outcome = OUTCOME.first(evidence.tables)
    if outcome is not None and (outcome.get("fault") or outcome.get("skipped_steps")):
        return None  # another rule reports it
    known = UPDATES.of(evidence.tables)
    cleared = [row for row in known if row["steps"] >= FEWEST and row["cleared"] == row["steps"]]
    rows = [row for row in known if row["compared"] and row["compared_steps"] >= FEWEST]
    still = [row for row in rows if not row["changed"]]
    # One of several optimizers may pause on purpose, with a learning rate of 0 or in its own phase.
    broken = cleared or (still if len(still) == len(rows) else [row for row in still if _reason(row, evidence)])
    if not broken:
        return None
    row = max(broken, key=lambda each: each["parameters"])
    reason, remedy = _reason(row, evidence) or _of_rate(row)
    what = f"{row['optimizer']} changes no weight in {counted(row['compared_steps'], 'step')}"
    if row not in still:  # the weights may still change by weight decay
        what = f"no gradient comes to {row['optimizer']} in {counted(row['steps'], 'step')} that were looked at"
    return of_training(f"{what}{reason}", remedy, broken)


def _never_stepped(evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis of a script that ended before an optimizer stepped."""
    row = NEVER_STEPPED.first(evidence.tables)
    if row is None or row["passes"] < FEWEST_PASSES:
        return None
    places = [f"{what} at {place}" for what, place in (("backward", row["backward"]), ("step()", row["step"])) if place]
    where = f" ({', '.join(places)})" if places else ""
    cause = f"the optimizer never stepped: {row['optimizer']} updates no weight in {row['passes']} backward passes"
    return of_training(f"{cause}{where}", STEP if row["step"] else f"if this is a training, {STEP}", [row])


def _reason(row: UpdatesRow, evidence: Evidence) -> tuple[str, str] | None:
    """Return the reason and the remedy, by the gradients before each observed step."""
    steps = row["steps"]
    if not steps:
        return None
    if row["cleared"] == steps:
        return ": the gradients are cleared between the backward pass and optimizer.step()", CLEARED
    if row["missing"] == steps:
        none = f": none of its {counted(row['parameters'], 'parameter')} gets a gradient"
        others = UNUSED_GRADIENTS.first(evidence.tables)
        if others is None:
            return none, MISSING
        count = counted(others["parameters"], "parameter")
        return f"{none}, but {count} that no optimizer holds, such as {others['first']}, do", OTHERS
    if row["zero"] == steps:
        return ": all its gradients are 0", ZERO
    return None


def _of_rate(row: UpdatesRow) -> tuple[str, str]:
    rate, dtype = row.get("learning_rate"), row.get("dtype")
    if rate == 0:
        return ": its learning rate is 0", RATE
    if rate is not None and dtype in HALF:
        return f": updates by a learning rate of {rate:.3g} are lost in {dtype} weights", ROUNDED
    return ("" if rate is None else f", at a learning rate of {rate:.3g}"), UNKNOWN


RULE = Rule(find, judges_loop=True, refines=("unused-gradients", "unused-passes"), precedes=("start-up",))
