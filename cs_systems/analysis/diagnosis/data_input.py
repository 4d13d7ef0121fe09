"""Rule for waiting for data: the step cannot begin before its batch has been loaded."""

from __future__ import annotations

from cs_systems.analysis.attribution.host_work import host_work
from cs_systems.analysis.comparison.loop_findings import ITERATORS, OWN_PYTHON, OwnPythonRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import after
from cs_systems.analysis.diagnosis.own_python import FEWEST, NOTABLE, named, started_collections
from cs_systems.analysis.replay import InputRemoved
from cs_systems.config import Phase
from cs_systems.core.statistics import quantile

REMEDY = "raise the data loader's num_workers and prefetch_factor, or prepare the data in advance"
ANEW = "make the loader and its iterator once, outside of the loop, with persistent_workers=True for several epochs"
IN_MEMORY = (
    "the data are tensors in memory: take whole batches of them, x[rows] for rows in indices.split(size), with "
    "torch.randperm(len(x)) as indices to shuffle them, where the DataLoader puts single rows together"
)
ONCE = "decompose matrices that are the same in each epoch once, before the loop; else "
READY_S = 2e-3  # a batch that workers have ready is taken from their queue in about this time
MOSTLY = 0.5  # share of the steps with a new iterator; above it, this is not the start of an epoch


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time that the phase `input` or the data loader takes; the same batch again shows what it would save."""
    step_s, waited_s = evidence.step_s, evidence.input_s
    if step_s is None or not waited_s or waited_s < _least_s(evidence, step_s):
        return None
    is_anew, collected = iterates_anew(evidence), started_collections(evidence, Phase.INPUT)
    waited_s = min(step_s, waited_s + sum(row["time_s"] for row in ends_of_iterators(evidence)))
    cause = f"{waited_s / step_s:.0%} of the step waits for the next batch"
    if is_anew:
        cause += ", from a data loader whose iterator is made anew in each step"
    if collected is not None:
        share = collected["time_s"] / collected["total_s"]
        cause += f", for which Python's garbage collector runs too ({share:.0%} of the loop)"
    row = {"phase": Phase.INPUT.value, "time_s": waited_s}
    expected = after(evidence, "same-batch")
    lines = (row for row in OWN_PYTHON.of(evidence.tables) if row["phase"] == Phase.INPUT and row["samples"] >= FEWEST)
    # the dataset's function, if the loop itself reads the dataset
    line = next((row for row in lines if row["place"]), None)
    work = host_work(line.get("calls") or "") if line is not None else None
    first = "make this faster, " if line is not None else ""
    if work is not None and work.words == "decomposes matrices":
        first = ONCE
    return Diagnosis(
        cause,
        ANEW if is_anew else IN_MEMORY if _collates_rows(evidence) else f"{first}{REMEDY}",
        step_s,
        step_s - waited_s,
        evidence=(row,),
        where=named(line) if line is not None else "",
        expected=expected,
        takes=waited_s,
        change=InputRemoved(),
    )


def iterates_anew(evidence: Evidence) -> bool:
    """Return whether a data loader begins an iterator in most steps, not only at the start of an epoch."""
    row = ITERATORS.first(evidence.tables)
    return row is not None and row["with_new"] >= MOSTLY * row["steps"]


def _collates_rows(evidence: Evidence) -> bool:
    """Return whether a data loader puts the batches of most steps together from single rows in memory."""
    row = ITERATORS.first(evidence.tables)
    return row is not None and row.get("collated", 0) >= MOSTLY * row["steps"]


def ends_of_iterators(evidence: Evidence) -> list[OwnPythonRow]:
    """Return the lines in phase `other` that end an iterator made for one step, and so wait for its workers."""
    if not iterates_anew(evidence):
        return []
    rows = (row for row in OWN_PYTHON.of(evidence.tables) if row.get("feeds_model"))
    return [row for row in rows if row.get("calls") in ("iter", "next")]


def _least_s(evidence: Evidence, step_s: float) -> float:
    """Return the shortest wait of a loop that counts.

    It is half of the range of the rest's middle 80%, since other programs that keep the machine busy slow down the
    workers of a data loader, too; and at least the time in which a ready batch is taken, up to a tenth of the step.
    """
    if evidence.measurement is None or not evidence.is_loop or evidence.has_mixed_steps:
        return 0.0
    rest_s = [s.wall_s - s.phases_s[Phase.INPUT] for s in evidence.measurement.timed]
    noise_s = (quantile(rest_s, 0.9) - quantile(rest_s, 0.1)) / 2 if rest_s else 0.0
    return max(noise_s, min(READY_S, NOTABLE * step_s))


RULE = Rule(find)
