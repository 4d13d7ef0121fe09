"""Rule for a learning rate that is far too small, because its schedule does not fit the training."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import LEARNING_RATES, RATE_SCHEDULES, RateScheduleRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

FEWEST = 3  # observed steps after the timed ones
VANISHED = 1e-3  # share of the largest rate; at the end of a short schedule a rate is larger, but for the last steps
REMEDY = "call scheduler.step() once per epoch, or give the scheduler the number of batches"
SHORT = "make the schedule as long as the training, with its length and its steps in the same unit"
RARE = "call scheduler.step() after each step of the optimizer, or, if it counts epochs, give it their number"
PLATEAU = "ReduceLROnPlateau"
MODE = "check its mode (min for a loss, max for a score) and its patience"
FEWEST_STEPS = 20  # of a whole script
MOST_CONSTANT = 0.4  # share of all steps with the last rate
FEWEST_LEVELS = 6  # different rates of a schedule; a program that trains in stages has fewer
SMALL = 0.01  # share of the largest rate that is too small for so many steps
SAME = 0.02  # most difference of two numbers of steps
SELDOM = 0.25  # most steps of a scheduler, as a share of those it is laid out for
OWN = "find what lowers it in each step, such as a scheduler that was meant for epochs"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find an optimizer of which the learning rate is a small share of the first ones in all steps after the timing."""
    rows = [row for row in LEARNING_RATES.of(evidence.tables) if row["observed_after"] >= FEWEST]
    rows = [row for row in rows if 0 < row["largest_after"] < VANISHED * row["largest"]]
    if not rows:
        return next(filter(None, map(_of_schedule, RATE_SCHEDULES.of(evidence.tables))), None)
    row = rows[0]
    name, times = row.get("scheduler"), row.get("scheduled")
    by = f": {name} has stepped {times} times" if name and times else ""
    cause = (
        f"the learning rate of {row['optimizer']} vanishes: from {row['largest']:.3g} to {row['last']:.3g} in "
        f"{row['steps']} steps{by}"
    )
    return of_training(cause, REMEDY if name else OWN, rows)


def _of_schedule(row: RateScheduleRow) -> Diagnosis | None:
    """Return the diagnosis of a schedule that ends long before the script, or that hardly begins until its end."""
    steps, planned, scheduled = row["steps"], row.get("planned"), row.get("scheduled")
    if steps < FEWEST_STEPS:
        return None
    fallen = f"from {row['largest']:.3g} to {row['last']:.3g}"
    if row.get("scheduler") == PLATEAU:
        if row["is_better"] or row["last"] > VANISHED * row["largest"]:
            return None  # as of a training that has converged
        cause = (
            f"{PLATEAU} has cut the learning rate of {row['optimizer']} {fallen}: the number that it gets has not "
            f"become better since the recorded ones of {steps:,} steps"
        )
        return of_training(cause, MODE, [row])
    if row["constant"] > MOST_CONSTANT * steps and row["levels"] >= FEWEST_LEVELS:
        if row["last"] >= SMALL * row["largest"]:
            return None
        cause = (
            f"the learning rate of {row['optimizer']} falls {fallen} and stays there for {row['constant']:,} of "
            f"{steps:,} steps"
        )
        return of_training(cause, SHORT, [row])
    if planned is None or scheduled is None or abs(planned - steps) > max(1, SAME * steps):
        return None
    if scheduled > SELDOM * planned:
        return None
    cause = (
        f"{row.get('scheduler')} is laid out for {planned:,} steps, but has stepped {scheduled:,} times in the "
        f"{steps:,} steps of {row['optimizer']}: at the end the learning rate is {row['last']:.3g}"
    )
    return of_training(cause, RARE, [row])


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
