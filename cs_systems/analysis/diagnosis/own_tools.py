"""Rule for a profiler or tracer that the program itself has left on."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import INNER_LINES, OWN_PYTHON, OWN_TOOLS, OwnToolRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import FEWEST, NOTABLE, work_of
from cs_systems.config import Phase
from cs_systems.core.units import human

TORCH, COUNTER, ALLOCATIONS = "torch.profiler", "FlopCounterMode", "tracemalloc"
REMEDY = "train without it, or limit it to a few steps (torch.profiler.schedule)"
COUNT_ONCE = "count the operations of one step, and train without it"
LEFT_ON = "train without it (tracemalloc.start, PYTHONTRACEMALLOC), and use it only in a search for a leak"
# kinds of work that hardly make Python objects
WAITS = ("sleeps", "waits for a server", "starts other programs", "collects garbage", "writes a file")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the extra time of steps under the program's own tool; if all steps are under it, what it can slow down."""
    rows = OWN_TOOLS.of(evidence.tables)
    known = [
        (extra_s, usual_s, row)
        for row in rows
        if (extra_s := row.get("extra_s")) is not None and (usual_s := row["without_s"]) is not None and row["total_s"]
    ]
    if known:
        extra_s, usual_s, row = max(known, key=lambda each: each[0])
        extra_s = max(0.0, extra_s)
        # The mean, because a tool often takes its time in the steps where it starts and stops.
        each = f"{human(usual_s + extra_s / row['steps'], 's')} each on average, without it {human(usual_s, 's')}"
        cause = (
            f"{extra_s / row['total_s']:.0%} of the loop is the program's own {row['tool']}, active in "
            f"{row['steps']} of {row['of_steps']} steps ({each})"
        )
        remedy = COUNT_ONCE if row["tool"] == COUNTER else REMEDY
        return Diagnosis(cause, remedy, row["total_s"], takes=extra_s, evidence=tuple(rows))
    step_s = evidence.step_s
    every = {row["tool"]: row for row in rows}
    always = every.get(TORCH) or every.get(COUNTER)
    if step_s is None or not (always or ALLOCATIONS in every):
        return None
    if always is None:
        return _of_allocations(every[ALLOCATIONS], evidence, step_s)
    slowed: tuple[Phase, ...]
    if always["tool"] == COUNTER:  # it may count a part of the step
        cause = f"each of {always['steps']} steps uses the program's own {COUNTER}, which slows each operator inside it"
        slowed, remedy = (Phase.FORWARD, Phase.LOSS), COUNT_ONCE
    else:
        cause = f"all {always['steps']} steps run under the program's own {always['tool']}, which slows each operator"
        slowed, remedy = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER), REMEDY
    return Diagnosis(cause, remedy, step_s, takes=min(step_s, evidence.phases_s(*slowed)), evidence=(always,))


def _of_allocations(row: OwnToolRow, evidence: Evidence, step_s: float) -> Diagnosis | None:
    """Find the time of own Python under a tool that traces each allocation; what of it is the tool's is unknown."""
    own = [each for each in OWN_PYTHON.of(evidence.tables) if each["samples"] >= FEWEST]
    slowed_s = sum(
        each["time_s"]
        for each in own
        if (work := work_of(each["function"], each.get("calls"))) is None or work.words not in WAITS
    )
    slowed_s += sum(each["time_s"] for each in INNER_LINES.of(evidence.tables) if each["is_plain"])
    slowed_s = min(step_s, slowed_s)
    if slowed_s < NOTABLE * step_s:
        return None
    cause = (
        f"all {row['steps']} steps run under the program's own {ALLOCATIONS}, which slows each allocation of a Python "
        f"object; {slowed_s / step_s:.0%} of the step is own Python"
    )
    return Diagnosis(cause, LEFT_ON, step_s, takes=slowed_s, evidence=(row,))


RULE = Rule(find, judges_loop=True, precedes=("own-python", "batch-preparation", "data-input", "python-in-forward"))
