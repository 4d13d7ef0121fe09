"""Rule for another thread of the program that works in Python: the loop waits for it, or for Python's lock."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import (
    OTHER,
    OWN_PYTHON,
    PYTHON_THREADS,
    WAITING,
    OwnPythonRow,
)
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis.own_python import FEWEST, called_at, work_of

NOTABLE = 0.15  # share of the timed steps
DELAYED = 0.25  # share of that time in which a thread of an operator waits for a core
FEWEST_TRIES = 2
FEWEST_FREE = 5  # tries that show that the lock was free; a thread may also work between fewer of them
LEAST_ON_CORE = 0.25  # share of that time in which the loop's thread ran, or waited for something else than a core
SELDOM = 0.1  # share of the tries at which the lock was held; below it, the loop waits for something else
WAITS = ("sleeps", "waits for a server", "starts other programs")  # kinds of work without a core
REMEDY = (
    "do its work in other processes (a data loader with num_workers, multiprocessing), by operators on whole tensors, "
    "or once before the loop"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the busiest thread, if the loop's thread waits inside the model's phases, or for a queue that it fills.

    The loop may also wait for something else, such as a socket, unless looks found the lock held; where operators use
    several threads, for one of these that waits for a core. On a GPU it may wait for kernels, and among ranks for the
    others.
    """
    row, step_s, config = PYTHON_THREADS.first(evidence.tables), evidence.step_s, evidence.config
    if row is None or step_s is None or config is None or config.world_size > 1 or config.device != "cpu":
        return None
    is_held = row["tries"] >= FEWEST_TRIES and row["held_share"] >= MOSTLY
    is_delayed = row["operator_threads"] > 1 and row["pool_queued_share"] > DELAYED * row["waited_share"]
    is_free = row["tries"] >= FEWEST_FREE and row["held_share"] < SELDOM
    if is_free or (is_delayed and not is_held):
        return None
    on_core = 1 - row.get("queued_share", 0.0)  # other programs may keep the loop's thread from its core
    if on_core < LEAST_ON_CORE or row["busy_share"] < MOSTLY * row["waited_share"]:
        return None
    # where cores are rare, the loop also waits for a thread that keeps the lock while it waits for a core itself
    ran = row.get("ran_share", row["busy_share"])
    waited = min(row["waited_share"] / on_core, ran / max(ran + on_core - row["waited_share"], ran))
    in_model = row["waited_share"] - _in_waiting_phases(evidence)
    if in_model < NOTABLE * on_core and not (is_held and row["puts"]):
        return None
    waited_s = waited * step_s
    waited_s -= evidence.input_s + sum(row["time_s"] for row in OWN_PYTHON.of(evidence.tables) if _waits_itself(row))
    if waited_s < NOTABLE * step_s:
        return None
    does = ", which fills a queue" if row["puts"] else ""
    thread = called_at(row["function"], row["place"], row["calls"])
    cause = (
        f"{waited_s / step_s:.0%} of the step the loop waits for the thread {thread}{does}: it holds Python's lock "
        "(GIL), without which no operator begins"
    )
    return Diagnosis(cause, REMEDY, step_s, evidence=(row,), takes=waited_s)


def _in_waiting_phases(evidence: Evidence) -> float:
    """Return the share of the timed steps outside of the model's phases.

    A wait for the lock comes at any operator, so the phases of single steps differ much, and their medians say little.
    """
    samples = evidence.measurement.timed if evidence.measurement is not None else ()
    all_s = sum(each.wall_s for each in samples)
    return sum(each.phases_s.get(name, 0.0) for each in samples for name in WAITING) / all_s if all_s else 0.0


def _waits_itself(row: OwnPythonRow) -> bool:
    """Return whether a line outside of the phases sleeps, or waits for another program."""
    work = work_of(row["function"], row.get("calls"))
    return row["phase"] == OTHER and row["samples"] >= FEWEST and work is not None and work.words in WAITS


RULE = Rule(find, refines=("batch-preparation", "own-python", "data-input", "host-time", "small-operators"))
