"""Rule for host synchronisation: the host waits for the GPU, and the GPU then waits for the host's next launch."""

from __future__ import annotations

from cs_systems.analysis.attribution.gaps import LAUNCH, SYNC
from cs_systems.analysis.attribution.tables import waits
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._waits import waiting_preparation
from cs_systems.analysis.replay import Expected, SyncRemoved
from cs_systems.core.units import counted

NOTABLE = 0.1  # share of the step of a function that prepares batches
PLAIN = "wait for the device less often: keep results there, and check them after many kernels"
ON_GPU = (
    "keep these numbers on the GPU: draw and use them as tensors, for the whole batch at once (masks by comparison, "
    "torch.where); or draw on the host what only the host reads (Python's random)"
)
REMEDY = "remove .item(), .cpu(), print and torch.cuda.synchronize() from the step, or call them every 100th step"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find waits of a function that prepares batches, or else the time of all waits."""
    return _of_preparation(evidence) or _of_all(evidence)


def _of_preparation(evidence: Evidence) -> Diagnosis | None:
    """Find a function that prepares batches and waits for the GPU many times; without it, the waits are gone too."""
    found, step_s = waiting_preparation(evidence), evidence.step_s
    if found is None or step_s is None or found.time_s < NOTABLE * step_s:
        return None
    lasted_s, first = min(step_s, found.time_s), found.rows[0]
    cause = (
        f"{lasted_s / step_s:.0%} of the step is {first['function']}(), which prepares the next batch and waits for "
        f"the GPU {found.waits} times ({found.how}), so that the GPU has no work"
    )
    return Diagnosis(
        cause,
        ON_GPU,
        step_s,
        step_s - lasted_s,
        evidence=found.rows,
        where=first["place"],
        refines=("batch-preparation", "launch-bound"),
    )


def _of_all(evidence: Evidence) -> Diagnosis | None:
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
