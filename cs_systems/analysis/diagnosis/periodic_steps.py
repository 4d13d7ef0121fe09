"""Rule for slow steps of a loop, such as every tenth one, with what they do besides a usual step."""

from __future__ import annotations

from cs_systems.analysis.attribution.host_work import host_work
from cs_systems.analysis.comparison.loop_findings import COLLECTIONS, SLOW_STEPS, SlowStepsRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.garbage_collection import FEWEST
from cs_systems.core.units import counted

_ORDINALS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth",
             10: "tenth", 20: "twentieth", 50: "fiftieth", 100: "hundredth"}  # fmt: skip
EVALUATION = "evaluate less often or on fewer batches"
REMEDY = "do this less often, or make it faster"


def steps_of(row: SlowStepsRow) -> str:
    """Return the slow steps in words: `every tenth step`, `3 slow steps`."""
    every = row.get("every")
    if every is None:
        return counted(row["steps"], "slow step")
    return f"every {_ORDINALS.get(every) or _ordinal(every)} step"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the kind of steps with the most time above that of usual steps."""
    rows = SLOW_STEPS.of(evidence.tables)
    if not rows or not (most := max(rows, key=lambda row: row["extra_s"]))["total_s"]:
        return None
    total_s, extra_s = most["total_s"], most["extra_s"]
    collected = next(iter(COLLECTIONS.of(evidence.tables)), None)
    if collected is not None and collected["in_steps"] >= FEWEST and collected["time_s"] > extra_s / 2:
        return None  # these steps are slow because of the garbage collector, which has its own rule
    cause = f"{extra_s / total_s:.0%} of the loop is in {steps_of(most)}"
    function, place, calls = most.get("function"), most.get("place"), most.get("calls")
    remedy = REMEDY
    if place:
        what = f"{function}() at {place}" if function else place
        if most.get("without_gradients"):
            cause, remedy = f"{cause}: {what}, forward passes without gradients", EVALUATION
        else:
            cause = f"{cause}: {what}{f', {calls}' if calls else ''}"
            work = host_work(calls or "")
            remedy = work.remedy if work else REMEDY
    else:
        remedy = "see what the loop does there besides a usual step"
    is_once = most["steps"] == 1
    return Diagnosis(
        cause,
        remedy,
        total_s,
        total_s - extra_s,
        takes=extra_s,
        evidence=tuple(rows),
        comes_last=is_once,
        is_outside=is_once,
    )


RULE = Rule(find, judges_loop=True)
