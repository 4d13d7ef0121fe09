"""Rule for many small operators on a CPU: their overhead takes the time, not their arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.analysis.comparison.loop_findings import (
    ELEMENT_SUMS,
    FORWARD_OPERATORS,
    INNER_LINES,
    ForwardOperatorsRow,
    InnerLineRow,
)
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.analysis.diagnosis.python_in_forward import places, work_of
from cs_systems.config import Phase
from cs_systems.core.units import human
from cs_systems.record import Measurement

FEWEST = 300  # operators of a forward pass; a loop over samples or time steps has more
MOST_ARITHMETIC = 0.25  # share of the time of forward and backward, in the fastest step
PASSES = 3  # arithmetic of forward and backward, as a multiple of forward's
NOTABLE = 0.10  # share of the step
# Of one own function, by samples of the stack: its share of forward and loss, the longest rest of a call in which a
# sample was requested, which a busy machine makes longer and not shorter, and the fewest such calls and samples.
MOST_OF_FORWARD, SHORT_S, FEWEST_CALLS, FEWEST_SAMPLES = 0.5, 1.5e-4, 100, 20
SMALL_S = 4e-5  # mean time of an operator of the fastest forward pass; arithmetic takes hardly half of it
FEWEST_OF_SUMS = 5  # samples in the lines of a running total
WHOLE = "use one operator over the whole tensor, such as x.sum() or x.mean(); Python's own sum() adds single elements"
PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
REMEDY = (
    "compute more in one operator: a whole batch in place of one sample, nn.LSTM in place of a loop over cells; or "
    "compile (torch.compile)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find passes with results too small to explain their time, or own functions that make many short calls."""
    one, sums = _of_graph(evidence) or _of_samples(evidence), _of_sums(evidence)
    if one is not None and sums is not None:
        return max(sums, one, key=lambda each: each.takes or 0.0)
    return one or sums


def _of_sums(evidence: Evidence) -> Diagnosis | None:
    """Find running totals over the elements of a tensor; backward counts at most as long as they."""
    row, step_s = ELEMENT_SUMS.first(evidence.tables), evidence.step_s
    if row is None or step_s is None or row["samples"] < FEWEST_OF_SUMS:
        return None
    counted = FORWARD_OPERATORS.first(evidence.tables)
    share = min(1.0, row["operators"] / counted["operators"]) if counted and counted["operators"] else 0.0
    backward_s = min(row["time_s"], share * evidence.phases_s(Phase.BACKWARD))
    takes = min(step_s, row["time_s"] + backward_s)
    if takes < NOTABLE * step_s:
        return None
    what = f"{row['operators']:,} small operators that add up elements of a tensor one after the other"
    cause = f"{takes / step_s:.0%} of the step is {what}, with their backward"
    where = called_at(row["function"], row["place"], row["calls"])
    return Diagnosis(cause, WHOLE, step_s, evidence=(row,), where=where, takes=takes)


def _of_graph(evidence: Evidence) -> Diagnosis | None:
    row, measurement, step_s = _whole_pass(evidence), evidence.measurement, evidence.step_s
    if row is None or measurement is None or step_s is None:
        return None
    least_s = _least_s(measurement, *PHASES)
    arithmetic_s = PASSES * row["arithmetic_s"]
    lasted_s = min(step_s, evidence.phases_s(*PHASES))
    if arithmetic_s > MOST_ARITHMETIC * least_s or lasted_s < NOTABLE * step_s:
        return None
    each_s, place = lasted_s / row["operators"], row.get("place")
    cause = (
        f"{lasted_s / step_s:.0%} of the step is {row['operators']:,} small operators, {human(each_s, 's')} each with "
        "their backward: overhead, not arithmetic"
    )
    where = called_at(row.get("function"), place, None) if place else ""
    at_best = step_s - lasted_s + min(lasted_s, arithmetic_s)
    return Diagnosis(cause, REMEDY, step_s, at_best, evidence=({**row},), where=where, takes=lasted_s)


def _of_samples(evidence: Evidence) -> Diagnosis | None:
    """Find own functions in forward and loss that use tensors, in a loop of short calls."""
    step_s = evidence.step_s
    if step_s is None or not evidence.is_loop:
        return None
    counted = _counted(evidence)
    by_function: dict[tuple[str, str], list[InnerLineRow]] = {}
    for row in INNER_LINES.of(evidence.tables):
        is_short = (row.get("late_s") or SHORT_S) < SHORT_S or row["function"] == counted
        if row["phase"] != Phase.BACKWARD and is_short and not row["is_plain"] and not work_of(row):
            by_function.setdefault((row["function"], row["place"].partition(":")[0]), []).append(row)
    passes_s = evidence.phases_s(Phase.FORWARD, Phase.LOSS)
    least_s, calm = max(NOTABLE * step_s, MOST_OF_FORWARD * passes_s), 1.0
    if evidence.measurement is not None and evidence.measurement.timed and passes_s:
        calm = min(1.0, _least_s(evidence.measurement, Phase.FORWARD, Phase.LOSS) / passes_s)
    rows = [
        row
        for (name, _), alike in by_function.items()
        if _is_short(alike, least_s, calm, name == counted)
        for row in alike
    ]
    if not rows:
        return None
    lasted_s = min(step_s, sum(row["time_s"] for row in rows))
    cause = f"{lasted_s / step_s:.0%} of the step is a loop over small operators: {places(rows, step_s)}"
    return Diagnosis(cause, REMEDY, step_s, takes=lasted_s, evidence=tuple(rows))


def _whole_pass(evidence: Evidence) -> ForwardOperatorsRow | None:
    """Return the operators of a forward pass if they are many, are the whole pass, and there are timed steps."""
    row, measurement = FORWARD_OPERATORS.first(evidence.tables), evidence.measurement
    if row is None or measurement is None or not measurement.timed:
        return None
    return row if row["operators"] >= FEWEST and not row.get("has_recurrent") else None


def _counted(evidence: Evidence) -> str | None:
    """Return the own function with most of a forward pass if its operators, by their number, take little time each."""
    row, measurement = _whole_pass(evidence), evidence.measurement
    if row is None or measurement is None:
        return None
    least_s = _least_s(measurement, Phase.FORWARD, Phase.LOSS)
    return row.get("function") if least_s <= SMALL_S * row["operators"] else None


def _least_s(measurement: Measurement, *phases: Phase) -> float:
    """Return the time of these phases in the step in which they are shortest."""
    return min(sum(sample.phases_s.get(phase, 0.0) for phase in phases) for sample in measurement.timed)


def _is_short(rows: Sequence[InnerLineRow], least_s: float, calm: float, is_counted: bool) -> bool:
    """Return whether a function takes much of forward in calls that are short, by their number or by samples.

    calm: the share of forward and loss that they take in their fastest step; a busy machine makes the others longer,
    and so the number of calls that their time could hold.
    """
    time_s, late_s = sum(row["time_s"] for row in rows), max(row["late_s"] or SHORT_S for row in rows)
    is_seen = sum(row["samples"] for row in rows) >= FEWEST_SAMPLES
    return is_seen and time_s >= least_s and (is_counted or calm * time_s >= FEWEST_CALLS * 2 * late_s)


RULE = Rule(find)
