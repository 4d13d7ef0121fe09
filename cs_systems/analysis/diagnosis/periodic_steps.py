"""Rule for slow steps of a loop or a recording, such as every tenth one, with what they do besides a usual step."""

from __future__ import annotations

import re
from typing import Literal

from cs_systems.analysis.attribution.host_work import host_work
from cs_systems.analysis.attribution.slow_steps import beyond
from cs_systems.analysis.attribution.usual_steps import START_UP, Usual
from cs_systems.analysis.comparison.loop_findings import COLLECTIONS, ITERATORS, SLOW_STEPS, SlowStepsRow
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.data_input import REMEDY as LOAD
from cs_systems.analysis.diagnosis.garbage_collection import FEWEST
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.config import Phase
from cs_systems.core.units import counted

_ORDINALS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth",
             10: "tenth", 20: "twentieth", 50: "fiftieth", 100: "hundredth"}  # fmt: skip
_COLLECTIVE = re.compile(
    r"(\bdist(?:ributed)?\.)?\b(all_(reduce|gather|to_all)|reduce(_scatter)?|broadcast|barrier|gather|scatter)\w*$"
)
_INSTANT = re.compile(
    r"(?:len|isinstance|issubclass|callable|hasattr|id|range|enumerate|zip)$|.*\.(?:append|size|dim|numel)$"
)
FEWEST_PERIODIC = 4  # three slow steps have equal distances by chance
LOOKS = 3  # fewest samples of the extra time of a single slow step in its function
WORKED = 0.5  # least share of that time in which the process had a core
IN_EACH_STEP = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER)
EVALUATION = "evaluate less often or on fewer batches"
LOOK = "see what the loop does there besides a usual step"
REMEDY = "do this less often, or make it faster"
KEEP_WORKERS = (
    "make the data loader once, and keep its workers between epochs (persistent_workers=True); the time in which they "
    "load the first batch of an epoch remains"
)


def steps_of(row: SlowStepsRow) -> str:
    """Return the slow steps in words: `every tenth step`, `3 slow steps`."""
    return _in_words(row["steps"], row.get("every"))


def _in_words(count: int, every: int | None) -> str:
    if every is None:
        return counted(count, "slow step")
    return f"every {_ORDINALS.get(every) or _ordinal(every)} step"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the kind of steps with the most extra time compared with usual steps."""
    if not (kinds := SLOW_STEPS.of(evidence.tables)):
        return _of_trace(evidence.usual) if evidence.usual else None
    rows = [row for row in kinds if not _is_of_each_step(row) and not _waits_for_ranks(row, evidence)]
    rows = [row for row in rows if not _is_doubtful(row)]
    if not rows or not (most := max(rows, key=lambda row: row["extra_s"]))["total_s"]:
        return None
    total_s, extra_s = most["total_s"], most["extra_s"]
    begun = most.get("waits_for_batch") and _are_with(most, evidence, "with_new")
    input_share = evidence.input_s / evidence.step_s if evidence.step_s and most.get("waits_for_batch") else 0.0
    is_of_epochs = begun and extra_s > input_share * total_s
    if input_share >= WORTH and not is_of_epochs:
        return None  # the rule of the input reports it
    collected = COLLECTIONS.first(evidence.tables)
    if collected is not None and collected["in_steps"] >= FEWEST and collected["time_s"] > extra_s / 2:
        return None  # these steps are slow because of the garbage collector, which another rule reports
    cause = f"{extra_s / total_s:.0%} of the loop is in {steps_of(most)}"
    function, place, calls = most.get("function"), most.get("place"), _calls(most)
    remedy = REMEDY
    if place:
        if most.get("without_gradients"):
            what = f"{called_at(function, place, None)}, forward passes without gradients"
            cause, remedy = f"{cause}: {what}", EVALUATION
        else:
            cause = f"{cause}: {called_at(function, place, calls)}"
            work = host_work(calls or "")
            remedy = work.remedy if work else REMEDY
            if most.get("waits_for_batch") and not most.get("makes_order"):
                begins, remedy = _beginning(most, evidence) if begun else ("", LOAD)
                cause = f"{cause}, which {begins}loads the next batch"
    else:
        remedy = LOOK
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
        # a longer loop does not repeat its start-up
        precedes=("start-up", "data-input") if is_of_epochs else ("start-up",),
    )


def _beginning(row: SlowStepsRow, evidence: Evidence) -> tuple[str, str]:
    """Return what slow steps do that begin an iterator of a data loader, and the remedy."""
    if _are_with(row, evidence, "started"):
        return "starts the workers of the data loader again and ", KEEP_WORKERS
    known = any("started" in each for each in ITERATORS.of(evidence.tables))  # old records do not tell
    return "begins an iterator of the data loader and ", LOAD if known else KEEP_WORKERS


def _are_with(row: SlowStepsRow, evidence: Evidence, name: Literal["with_new", "started"]) -> bool:
    """Return whether as many of the timed steps began an iterator of a data loader, or started workers, as are slow."""
    found, every = ITERATORS.first(evidence.tables), row.get("every")
    if found is None or every is None:
        return False
    count = found.get(name, 0)
    return count > 0 and abs(count - found["steps"] / every) <= 1


def _is_of_each_step(row: SlowStepsRow) -> bool:
    """Return whether a usual step does the same, so that a busy machine or a larger batch made these steps slower."""
    is_irregular = row.get("every") is None or row["steps"] < FEWEST_PERIODIC
    return is_irregular and (row.get("phase") in IN_EACH_STEP or row.get("as_usual", False))


def _calls(row: SlowStepsRow) -> str | None:
    """Return the function that is called at the place of a row, unless it cannot take long there, such as `len`."""
    calls = row.get("calls")
    return None if calls is None or _INSTANT.match(calls) else calls


def _is_doubtful(row: SlowStepsRow) -> bool:
    """Return whether a single slow step may be slow because of the machine, as far as is known.

    It is the program's if it evaluates or does some known work, such as a checkpoint. Else several samples must be in
    one function, and the process must have had a core in most of the extra time.
    """
    if row["steps"] != 1 or (row.get("place") and row.get("without_gradients")):
        return False
    if not row.get("place") or (row.get("calls") and not _calls(row)):
        return True
    is_seen = row.get("looks", 0) >= LOOKS and (row.get("worked_share") or 0.0) >= WORKED
    return not is_seen and host_work(row.get("calls") or "") is None


def _waits_for_ranks(row: SlowStepsRow, evidence: Evidence) -> bool:
    """Return whether the steps are slow in a collective, which the rules of communication and the straggler judge.

    One process has only those of torch.distributed: `reduce` or `gather` alone may be any function.
    """
    found = _COLLECTIVE.search(row.get("calls") or "")
    has_ranks = evidence.config is not None and evidence.config.world_size > 1
    return found is not None and (found[1] is not None or has_ranks)


def _of_trace(usual: Usual) -> Diagnosis | None:
    """Find the slow steps of a recording, except updates of accumulated gradients, and single steps without a name."""
    found = [one for one in usual.apart if one.kind != START_UP]
    if not found or not usual.total_s:
        return None
    most = max(found, key=lambda one: one.beyond_s)
    work = beyond(usual, most)
    if work.is_update or not (most.every or work.name or work.only_forward):
        return None
    passes = "forward passes without backward" if work.only_forward else ""
    what = ", ".join(filter(None, [work.name, passes]))
    share = most.beyond_s / usual.total_s
    known = host_work(work.name)
    count = len(most.steps)
    return Diagnosis(
        f"{share:.0%} of the recording is in {_in_words(count, most.every)}{what and ': '}{what}",
        known.remedy if known else EVALUATION if work.only_forward else REMEDY if what else LOOK,
        usual.total_s,
        usual.total_s - most.beyond_s,
        evidence=({"steps": count, "mean_s": most.each_s, "usual_s": most.usual_s, "every": most.every},),
        is_of_recording=True,
        comes_last=count == 1,
        is_outside=count == 1,
    )


RULE = Rule(find, judges_loop=True)
