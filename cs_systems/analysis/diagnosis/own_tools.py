"""Rule for a profiler or tracer that the program itself has left on."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OWN_TOOLS
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import Phase
from cs_systems.core.units import human

TORCH = "torch.profiler"
REMEDY = "train without it, or limit it to a few steps (torch.profiler.schedule)"


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
        return Diagnosis(cause, REMEDY, row["total_s"], takes=extra_s, evidence=tuple(rows))
    step_s = evidence.step_s
    always = next((row for row in rows if row["tool"] == TORCH), None)
    if always is None or step_s is None:
        return None
    slowed = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
    cause = f"all {always['steps']} steps run under the program's own {TORCH}, which slows each operator"
    slowed_s = min(step_s, evidence.phases_s(*slowed))
    return Diagnosis(cause, REMEDY, step_s, takes=slowed_s, evidence=(always,))


RULE = Rule(find, judges_loop=True)
