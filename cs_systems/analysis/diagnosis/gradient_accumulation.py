"""Rule for gradient accumulation: gradients are averaged in every pass, although the optimizer steps after several."""

from __future__ import annotations

from cs_systems.analysis.attribution.distribution import DDP
from cs_systems.analysis.comparison.loop_ranks import EXCHANGE, ExchangeRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence

REMEDY = (
    "average them in the last pass alone: run the others, forward and backward, under DistributedDataParallel.no_sync()"
)

OWN = "average them once, after the last pass"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find all-reduces in passes before the last one of an update; without them, their exposed time is gone."""
    found, step_s = evidence.distribution, evidence.step_s
    if step_s and (rows := EXCHANGE.of(evidence.tables)):
        return _of_loop(rows[0], step_s)
    if found is None or step_s is None or not found.early:
        return None
    reduces = sum(call.name == "all_reduce" for call in found.calls)
    exposed_s = found.exposed_s(found.early)
    cause = _cause(found.passes / found.updates, len(found.early), reduces)
    return Diagnosis(cause, REMEDY, step_s, step_s - exposed_s, subject=evidence.subject)


def _of_loop(row: ExchangeRow, step_s: float) -> Diagnosis | None:
    """Find the all-reduces of a loop without a following update; without them, their transfer time is saved."""
    if not row["early"]:
        return None
    remedy = REMEDY if row["wrapper"] == DDP else OWN
    cause = _cause(row["passes"], row["early"], row["reduces"])
    return Diagnosis(cause, remedy, step_s, step_s * (1 - row["early_share"]))


def _cause(passes: float, early: int, reduces: int) -> str:
    return (
        f"gradients are averaged in each of {passes:.2g} passes per update: {early} of {reduces} all-reduces are not "
        "needed"
    )


RULE = Rule(find, refines=("exposed-communication",))
