"""Rule for batches that the loop itself prepares: the step waits for its next batch in the main process."""

from __future__ import annotations

import re

from cs_systems.analysis.attribution.host_work import host_work
from cs_systems.analysis.comparison.loop_findings import (
    COLLECTOR,
    MANY_DRAWS,
    OTHER,
    OWN_PYTHON,
    PYTHON_THREADS,
    ManyDrawsRow,
    OwnPythonRow,
)
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._waits import waiting_preparation
from cs_systems.analysis.diagnosis.data_input import ends_of_iterators
from cs_systems.analysis.diagnosis.own_python import (
    FEWEST,
    LEAST,
    MOST,
    NOTABLE,
    RUNNING,
    called_at,
    named,
    polls,
    prepares_batch,
    reads_longer,
    started_collections,
)

REMEDY = "prepare batches in the workers of a data loader (num_workers, prefetch_factor), or once before the loop"
INDICES = "draw only the indices of the batch, or permute them once per epoch"
MADE_UP = "make the data once, before the loop"
IN_ONE = (
    "compute it in one operator where there is a closed form, as for noise that is added in small steps, or for the "
    "whole batch at once; else prepare batches in the workers of a data loader"
)
OF_REPLAY = (
    "take only the drawn rows, of one array in place of a list of objects, and keep sums up to date (a sum tree for "
    "priorities); workers of a data loader do not see what the loop adds"
)
SHORT_S = 1e-3  # most time of a function for each of its many draws
NOTABLE_MADE_UP = 0.25  # share of the step; random numbers often stand for data, as in a test
# Patterns of the function that is called. Of other kinds of work, only the remedies of these are right for data.
_PERMUTES = re.compile("permutation|shuffle|randperm")
_MAKES_UP = re.compile(r"\b(randn?|randint|normal|uniform|standard_normal)(_like)?\b")
_READS_QUEUE = re.compile(r"\.get(_nowait)?$")
_REPLAYS = re.compile(r"(replay\w*|rollout\w*|\bmemory)\.\w*(sample|draw|get|batch)|buffer\.\w*sample", re.IGNORECASE)
_OF_DATA = ("tokenizes text", "decodes images", "waits for a server", "sleeps")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the own functions with results that become the model's input, by the data flow in the loop's source."""
    step_s, phase_s = evidence.step_s, evidence.phase_s(OTHER)
    of_loader = ends_of_iterators(evidence)
    own = (row for row in OWN_PYTHON.of(evidence.tables) if row["phase"] == OTHER and row not in of_loader)
    rows = [row for row in own if prepares_batch(row) and row["samples"] >= FEWEST]
    if not evidence.is_loop or not rows or step_s is None or phase_s is None:
        return None
    if (waiting := waiting_preparation(evidence)) is not None and waiting.rows[0]["function"] == rows[0]["function"]:
        return None  # `host_synchronisation` reports it
    calls = rows[0].get("calls") or ""
    lasted_s = min(sum(row["time_s"] for row in rows), step_s, phase_s)
    if lasted_s < (NOTABLE_MADE_UP if _MAKES_UP.search(calls) else NOTABLE) * step_s:
        return None
    shown = [row for row in rows if row["time_s"] >= LEAST * step_s][:MOST]
    lines = ", ".join(f"{named(row)} ({row['time_s'] / step_s:.0%})" for row in shown)
    polled = polls(rows[0])
    how = f"and the main process {polled.words}" if polled else f"which {_preparing(calls, evidence)} prepares"
    cause = f"{lasted_s / step_s:.0%} of the step waits for the next batch, {how}: {lines}"
    at_best = step_s - lasted_s - _collected_s(evidence)
    remedy = polled.remedy if polled else _remedy(rows[0]["function"], calls)
    if (many := _many_draws(rows[0], evidence)) is not None and not polled:
        cause += f"; it is many small operators: {many['drawn']} runs at least {many['calls']} times a step"
        remedy = IN_ONE
    if reads := reads_longer(shown, step_s):
        cause = f"{cause}{reads}"
        remedy = remedy if remedy == OF_REPLAY else f"{RUNNING}; else {remedy}"
    return Diagnosis(cause, remedy, step_s, at_best, evidence=tuple(rows), takes=lasted_s)


def _preparing(calls: str, evidence: Evidence) -> str:
    """Return the thread that fills the queue which a line reads, or else the main process."""
    filling = (row for row in PYTHON_THREADS.of(evidence.tables) if row["puts"] and _READS_QUEUE.search(calls))
    thread = next(filling, None)
    if thread is None:
        return "the main process"
    return f"the thread {called_at(thread['function'], thread['place'], None)}"


def _many_draws(row: OwnPythonRow, evidence: Evidence) -> ManyDrawsRow | None:
    """Return the draws at a function's line of most time, if there are many, with little work for each of them."""
    at_line = (each for each in MANY_DRAWS.of(evidence.tables) if each["place"] == row["place"])
    many = max(at_line, key=lambda each: each["calls"], default=None)
    return many if many is not None and row["time_s"] <= SHORT_S * many["calls"] else None


def _collected_s(evidence: Evidence) -> float:
    """Return the time of a step in garbage collections that the preparation starts, and that go with it."""
    if started_collections(evidence, OTHER) is None:
        return 0.0
    own = OWN_PYTHON.of(evidence.tables)
    return sum(row["time_s"] for row in own if row["phase"] == OTHER and row["function"] == COLLECTOR)


def _remedy(function: str | None, calls: str) -> str:
    if _PERMUTES.search(calls):
        return INDICES
    if _MAKES_UP.search(calls):
        return MADE_UP
    work = host_work(calls)
    if work and work.words in _OF_DATA:
        return work.remedy
    return OF_REPLAY if _REPLAYS.search(function or "") else REMEDY


RULE = Rule(find)
