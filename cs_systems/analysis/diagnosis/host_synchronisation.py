"""Rule for host synchronisation: the host waits for the GPU, and the GPU then waits for the host's next launch."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import LAUNCH, SYNC
from cs_systems.analysis.attribution.tables import waits
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.replay import Expected, SyncRemoved
from cs_systems.core.units import counted

PLAIN = "wait for the device less often: keep results there, and check them after many kernels"
REMEDY = "remove .item(), .cpu(), print and torch.cuda.synchronize() from the step, or call them every 100th step"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the step would save without these waits, by replay; without a replay, the idle time in them.

    A replay is more precise: after a wait, the device is idle until the host has launched again. Savings beyond that
    time and the waits have other causes, such as work of the host between them.
    """
    step_s, idle_s = evidence.step_s, evidence.idle_s.get(SYNC, 0.0)
    places = waits.of(evidence.tables)
    if step_s is None or not (idle_s or places):
        return None
    answer = evidence.replay.what_if(SyncRemoved()) if evidence.replay is not None and places else None
    waited_s = idle_s + evidence.idle_s.get(LAUNCH, 0.0)
    replayed = isinstance(answer, Expected) and answer.share >= WORTH and waited_s >= WORTH * step_s
    if not idle_s and not replayed:
        return None
    share = min(answer.share, waited_s / step_s) if isinstance(answer, Expected) and replayed else idle_s / step_s
    cause = f"{share:.0%} of the step the GPU is idle because the host synchronises with it"
    named = [row for row in places if row["within"]]
    where = "; ".join(
        f"{counted(round(row['calls_per_step']), 'time')} in {row['within']}"
        for row in named[:1]
        if row["calls_per_step"] >= 1
    )
    rows = (*evidence.gaps_by(SYNC), *({**row} for row in places))
    remedy = REMEDY if evidence.uses_torch else PLAIN
    at_best = step_s - idle_s if idle_s else None
    change = SyncRemoved()
    return Diagnosis(cause, remedy, step_s, at_best, evidence=rows, where=where, takes=share * step_s, change=change)


RULE = Rule(find)
