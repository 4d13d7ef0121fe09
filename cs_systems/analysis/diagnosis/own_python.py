"""Rule for a program's own Python: time of a step in which neither the model nor the optimizer runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from cs_systems.analysis.attribution.gaps import MALLOC
from cs_systems.analysis.attribution.host_work import COPIES_FIELDS, HostWork, host_work
from cs_systems.analysis.comparison.loop_findings import (
    CALLS,
    COLLECTIONS,
    COLLECTOR,
    HOST_SYNC,
    OTHER,
    OWN_PYTHON,
    UNSAMPLED,
    CollectionRow,
    OwnPythonRow,
)
from cs_systems.analysis.comparison.loop_ranks import LATE_RANK, LOOP_RANKS, PYTHON, LoopRankRow
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Rule, Unknown
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis._findings import EXPLAINS
from cs_systems.analysis.timing_caveats import launch_bound_phases
from cs_systems.config import Phase
from cs_systems.record import Measurement

NOTABLE = 0.10  # share of the step; less is the loop's own bookkeeping
# Share of the step up to which it takes a place that is worth a change: an environment of reinforcement learning takes
# this long in a few lines each of several functions, none of which can be mended alone.
SPREAD = 0.2
LEAST = 0.02  # least share of the step for a function that is named
MOST = 3  # number of functions that are named
READ_LESS = "read numbers less often, and many at once (torch.stack(…).tolist())"
READING = 0.25  # share of the time of own Python
EMPTY_CACHE = "empty_cache"
READS = ("item", "tolist")  # methods that read numbers from the GPU
FEWEST = 3  # fewest samples of the stack for a function
LOGGED = HostWork("computes what it writes to a log", "log less often, or fewer values")
SORTED = HostWork(
    "sorts", "sort less often; if only the largest or smallest are used, take these alone (Tensor.topk, heapq)"
)
SORTS = re.compile(r"\b(arg)?sort(ed)?$")
METRIC = re.compile(r"(?<![a-z])(metrics?|recall|ndcg|mrr|accuracy|auc|iou|bleu|rouge)(?![a-z])", re.IGNORECASE)
SORTED_FOR_METRIC = HostWork("sorts for a metric", f"{SORTED.remedy}; or compute the metric every few steps")
POLL = "wait for it without a pause: get() of a queue with a timeout, wait() of an event, or result() of a future"
COLLECTIVES = re.compile(  # methods of a tensor named dist, such as gather, are none
    r"(?:(?<![\w.])dist|distributed)\.(?:all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|barrier)\w*$"
)
REMEDY = "do it less often, make it faster, or, if it prepares data, move it into the workers of a data loader"
RUNNING = "keep a running result, or only the latest entries, in place of reading all of them again"
OF_LOSS = (
    "make it faster, or, if it prepares data, move it into the workers of a data loader; the loss is computed from its "
    "result"
)


def called_at(function: str | None, place: str, calls: str | None) -> str:
    """Return a function with its line and what it calls: `augment() at train.py:8`, `train.py:9, time.sleep`."""
    where = f"{function}() at {place}" if function else place
    return f"{where}, {calls}" if calls else where


def work_of(function: str | None, calls: str | None) -> HostWork | None:
    """Return the kind of work, by the called function, else by the program's own function."""
    return host_work(calls or "") or host_work((function or "").rpartition(".")[2])


def polls(row: OwnPythonRow) -> HostWork | None:
    """Return the kind of work of a loop that sleeps between two looks at something; None for any other row."""
    looked_at = row.get("polls")
    return HostWork(f"sleeps between two looks at {looked_at}", POLL) if looked_at else None


def prepares_batch(row: OwnPythonRow) -> bool:
    """Return whether a line makes inputs of the model, and does not only copy them."""
    return bool(row.get("feeds_model")) and host_work(row.get("calls") or "") is not COPIES_FIELDS


def named(row: OwnPythonRow) -> str:
    """Return the function of a row with its line and what it calls."""
    return called_at(row["function"], row["place"], row.get("calls"))


def reads_longer(rows: Sequence[OwnPythonRow], step_s: float) -> str:
    """Return the clause on what a line reads in each step, if that gets longer; "" if no line of the rows does."""
    row = next((row for row in rows if row.get("reads") and row["time_s"] >= WORTH * step_s), None)
    if row is None:
        return ""
    more = row["reads_more"]
    how = f"by about {float(f'{more:.2g}'):,.0f} elements a step" if more >= 2 else "from step to step"
    return f"; {row['place']} reads all of {row['reads']}, which grows {how}"


def longest(rows: Sequence[OwnPythonRow], step_s: float) -> tuple[list[OwnPythonRow], str]:
    """Return the first rows with a share of the step that is worth naming, and these as text."""
    shown = [row for row in rows if row["time_s"] >= LEAST * step_s][:MOST]
    return shown, ", ".join(f"{named(row)} ({row['time_s'] / step_s:.0%})" for row in shown)


def _of_leading(ranks: Sequence[LoopRankRow], step_s: float) -> float:
    """Return the time outside of all phases, without communication, of the rank that the others wait for."""
    return sum(step_s * row["other_s"] / row["step_s"] for row in ranks if row.get("leads") and row["step_s"])


def started_collections(evidence: Evidence, *phases: str) -> CollectionRow | None:
    """Return the garbage collections that an own function triggers, if it takes at least half as much time as they do.

    Without the function's work the collector would not run, so it is not a separate cause. phases: those in which the
    function works.
    """
    row, step_s = COLLECTIONS.first(evidence.tables), evidence.step_s
    if row is None or row.get("is_called") or not step_s or not row["total_s"]:
        return None
    place = (row.get("function"), (row.get("place") or "").partition(":")[0])
    of_function = (
        each["time_s"]
        for each in OWN_PYTHON.of(evidence.tables)
        if each["phase"] in phases and (each["function"], each["place"].partition(":")[0]) == place
    )
    own_share, share = sum(of_function) / step_s, row["time_s"] / row["total_s"]
    return row if own_share >= max(NOTABLE, EXPLAINS * share) and share >= WORTH else None


def empties_cache(row: OwnPythonRow) -> bool:
    """Return whether a line outside of the phases gives cached memory back to the device."""
    return row["phase"] == OTHER and row["samples"] >= FEWEST and (row.get("calls") or "").endswith(EMPTY_CACHE)


def is_lonely(row: OwnPythonRow, evidence: Evidence) -> bool:
    """Return whether a function is mostly collectives between the phases, in a program of one process on a CPU.

    On a GPU they may wait for its kernels.
    """
    config = evidence.config
    is_alone = config is not None and config.world_size == 1 and config.device == "cpu"
    is_most = row.get("place_share", 0.0) >= MOSTLY
    return is_alone and is_most and row["phase"] == OTHER and bool(COLLECTIVES.search(row.get("calls") or ""))


def _with_reads(
    rows: Sequence[OwnPythonRow], own: Sequence[OwnPythonRow], measurement: Measurement
) -> tuple[float, list[OwnPythonRow]]:
    """Return (time, rows): the time in which lines of rows read numbers from an idle GPU, and the rows with it."""
    if HOST_SYNC not in launch_bound_phases(measurement):
        return 0.0, [*rows]
    reads_s: Counter[str] = Counter()
    for read in own:
        if read["phase"] == HOST_SYNC and (read.get("calls") or "").rpartition(".")[2] in READS:
            reads_s[read["place"]] += read["time_s"]  # type: ignore[assignment]
    total_s = sum(reads_s[place] for place in {row["place"] for row in rows})
    found: list[OwnPythonRow] = [{**row, "time_s": row["time_s"] + reads_s.pop(row["place"], 0.0)} for row in rows]
    return total_s, sorted(found, key=lambda row: -row["time_s"]) if total_s else found


def _is_spread(rows: Sequence[OwnPythonRow], own: Sequence[OwnPythonRow], step_s: float) -> bool:
    """Return whether no place has a share of the step that is worth a change.

    A place is a function, or a line of the function that also calls the model or the optimizer: the loop itself.
    """
    loops = {row["function"] for row in own if row["phase"] in (Phase.BACKWARD, Phase.OPTIMIZER)}
    most_s = max(row["time_s"] * (row.get("place_share", 1.0) if row["function"] in loops else 1.0) for row in rows)
    return most_s < WORTH * step_s


def find(evidence: Evidence) -> Diagnosis | Unknown | None:
    """Find the phase `other` of a loop, with the functions that take its time; another rule reports batches."""
    step_s, measurement = evidence.step_s, evidence.measurement
    if not evidence.is_loop or step_s is None or measurement is None or OTHER not in measurement.phase_names():
        return None
    own = OWN_PYTHON.of(evidence.tables)
    of_phase = [row for row in own if row["phase"] == OTHER and row["samples"] >= FEWEST]
    rows = [row for row in of_phase if row["function"] not in (COLLECTOR, CALLS) and not prepares_batch(row)]
    if MALLOC in evidence.idle_s:  # `device_allocation` reports these lines
        rows = [row for row in rows if not empties_cache(row)]
    rows = [row for row in rows if not is_lonely(row, evidence)]  # `lonely_collectives` reports them
    not_own_s = sum(row["time_s"] for row in of_phase) - sum(row["time_s"] for row in rows)
    lasted_s = max(0.0, min(step_s, evidence.phase_s(OTHER) or 0.0) - not_own_s)
    read_s, rows = _with_reads(rows, own, measurement)
    lasted_s = min(step_s, lasted_s + read_s)
    if ranks := LOOP_RANKS.of(evidence.tables):
        # observed in few steps, which may be slower than the timed ones: the rest has at most its share of them
        leading_s, not_own = _of_leading(ranks, step_s), sum(row["share"] for row in of_phase if row not in rows)
        lasted_s = max(0.0, min(leading_s - not_own_s, leading_s * (1 - not_own)))
        if any(
            late["work"] == PYTHON and late["share"] * step_s > lasted_s / 2 for late in LATE_RANK.of(evidence.tables)
        ):
            return None  # the straggler rule reports it
    if lasted_s < NOTABLE * step_s:
        return None
    share = f"{lasted_s / step_s:.0%} of the step"
    shown, lines = longest(rows, step_s)
    if not shown:
        reasons = UNSAMPLED.of(evidence.tables)
        why = f": {reasons[0]['reason']}; {reasons[0]['remedy']}" if reasons else ""
        return Unknown(f"what runs in {share} outside the model's phases{why}")
    if lasted_s < SPREAD * step_s and _is_spread(rows, own, step_s):
        return None
    # a part of the loss is no work that could be done less often, whatever its function is named
    is_of_loss = shown[0].get("feeds_loss", False)
    work = polls(shown[0]) or work_of(None if is_of_loss else shown[0]["function"], shown[0].get("calls"))
    work = work or (LOGGED if shown[0].get("writes") else None)
    if work is None and SORTS.search(shown[0].get("calls") or ""):
        work = SORTED_FOR_METRIC if METRIC.search(shown[0]["function"] or "") else SORTED
    does = f", which {work.words}" if work and shown[0]["time_s"] >= MOSTLY * lasted_s else ""
    cause = f"{share} is the script's own Python{does}: {lines}"
    remedy = work.remedy if work else OF_LOSS if is_of_loss else REMEDY
    if read_s > READING * lasted_s:
        cause += f"; {read_s / step_s:.0%} of the step reads numbers from the GPU (.item())"
        remedy = READ_LESS if remedy == REMEDY else f"{remedy}; {READ_LESS}"
    if reads := reads_longer(shown, step_s):
        cause, remedy = f"{cause}{reads}", f"{RUNNING}; else {remedy}"
    if (collected := started_collections(evidence, OTHER)) is not None:
        of_loop = collected["time_s"] / collected["total_s"]
        cause += f"; objects made there also start Python's garbage collector, {of_loop:.0%} of the loop"
    if any(row.get("feeds_loss") for row in shown):  # other operators before the loss change its backward, too
        return Diagnosis(cause, remedy, step_s, takes=lasted_s, evidence=tuple(rows))
    return Diagnosis(cause, remedy, step_s, step_s - lasted_s, evidence=tuple(rows))


# No graph and no compiler removes the program's own Python.
RULE = Rule(find, refines=("launch-bound", "host-time"))
