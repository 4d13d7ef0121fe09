"""Goals of a search, and the judgement of a candidate compared with the best cell: a gain, no gain, or undecided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from cs_systems.analysis.comparison.loop_findings import COLLECTIONS, SLOW_STEPS
from cs_systems.analysis.comparison.runs import processes
from cs_systems.core import statistics
from cs_systems.core.tables import first_row
from cs_systems.core.units import human
from cs_systems.formulas import energy
from cs_systems.record import RunRecord

LEAST_GAIN = statistics.MINIMUM_EFFECT
UNEVEN = 0.1  # share of a loop's time that steps of another kind take beyond a usual step
PLAIN = 2.0  # ratio of two processes that their variation does not explain, even on a busy host
FEW_PAIRS, MANY_PAIRS = 3, 12  # most pairs of processes of a trial, and of one to which the search comes back
LATER = 0.3  # share of the error that is kept for the pairs after the first few


def level_after(pair: int) -> float:
    """Return the level of the interval after a pair, counted from 1, so that a trial may end after any of them.

    The error of 5% is divided among the pairs of an option on one best cell; where another cell becomes the best, a
    trial begins anew. The test of core/sequential.py assumes less, but takes at least 8 pairs, too many for a search of
    minutes. The few processes of a cell hardly show how much they vary, so that those of the other cells show it too.
    """
    error = 1 - statistics.CONFIDENCE
    if pair <= FEW_PAIRS:
        return 1 - (1 - LATER) * error / FEW_PAIRS
    return 1 - LATER * error / (MANY_PAIRS - FEW_PAIRS)


CONFIDENCE = level_after(1)


class Judgement(NamedTuple):
    """Ratio of the candidate to the best cell, below 1 for a gain, with its interval.

    is_gain: None while neither a gain nor its absence is certain.
    is_sure: False if the variation between processes is an assumption, and the ratio is below PLAIN.
    """

    is_gain: bool | None
    ratio: float
    low: float | None
    high: float | None
    is_sure: bool = True


Records = Sequence[RunRecord]


def judge_time(
    best: Records,
    candidate: Records,
    times: float = 1.0,
    others: Iterable[Records] = (),
    confidence: float = CONFIDENCE,
) -> Judgement:
    """Compare the steps of fresh processes, given one record each.

    Where some steps do more, such as an evaluation, compare the mean step: the others hide what these steps gain.

    Args:
        best: records of the best cell.
        candidate: records of the candidate.
        times: the candidate's batch over the best's.
        others: other records, by cell; they also show how much processes vary here.
        confidence: the level of the interval.
    """
    if is_uneven(best[0]) or is_uneven(candidate[0]):
        return _judge_numbers(mean_s, best, candidate, times, others, confidence)
    scaled = [[[step / times for step in steps] for steps in rounds] for rounds in processes(candidate, "step")]
    varied = [processes(records, "step") for records in others]
    found = statistics.ratio_interval(processes(best, "step"), scaled, confidence, varied)
    excludes = found.low is not None and found.low > 1 / (1 + LEAST_GAIN)
    is_gain = True if found.verdict == "faster" else False if excludes else None
    is_sure = found.unseen is None or max(found.ratio, 1 / found.ratio) >= PLAIN
    return Judgement(is_gain, found.ratio, found.low, found.high, is_sure)


def judge_memory(
    best: Records,
    candidate: Records,
    times: float = 1.0,
    others: Iterable[Records] = (),
    confidence: float = CONFIDENCE,
) -> Judgement:
    """Compare the peaks, which equal processes repeat to the byte."""
    before, after = (max(peak_bytes(record) or 0 for record in records) for records in (best, candidate))
    ratio = after / before if before else 1.0
    return Judgement(ratio < 1 - LEAST_GAIN, ratio, ratio, ratio)


def judge_energy(
    best: Records,
    candidate: Records,
    times: float = 1.0,
    others: Iterable[Records] = (),
    confidence: float = CONFIDENCE,
) -> Judgement:
    """Compare the energy of a step."""
    return _judge_numbers(step_j, best, candidate, times, others, confidence)


def _judge_numbers(
    value: Callable[[RunRecord], float | None],
    best: Records,
    candidate: Records,
    times: float,
    others: Iterable[Records],
    confidence: float,
) -> Judgement:
    """Compare one number per process; one process a side shows no noise, and decides nothing if no others show it."""
    then, now = ([[[value(record) or 0.0]] for record in records] for records in (best, candidate))
    scaled = [[[number / times for number in steps] for steps in rounds] for rounds in now]
    varied = [[[[number]] for record in records if (number := value(record))] for records in others]
    found = statistics.ratio_interval(then, scaled, confidence, varied)
    return Judgement(True if found.verdict == "faster" else None, found.ratio, found.low, found.high)


def peak_bytes(record: RunRecord) -> int | None:
    return record.measurement.peak_allocated_bytes if record.measurement else None


def step_s(record: RunRecord, start: RunRecord | None = None) -> float | None:
    """Return the median step; the mean where some steps do more, of the search's start if given."""
    if is_uneven(start or record):
        return mean_s(record)
    return record.measurement.median_s() if record.measurement else None


def mean_s(record: RunRecord) -> float | None:
    return fmean(sample.wall_s for sample in record.measurement.timed) if record.measurement else None


def is_uneven(record: RunRecord) -> bool:
    """Return whether some steps do what others do not, such as an evaluation, in a notable part of a loop's time.

    It is at a known place of the loop's code, or calls gc.collect; other slow steps may be noise.
    """
    rows = [row for row in SLOW_STEPS.of(record.results) if row.get("place") and row["steps"] > 1]
    called = [row for row in COLLECTIONS.of(record.results) if row["is_called"] and 1 < row["in_steps"] < row["steps"]]
    shares = [(row["extra_s"], row["total_s"]) for row in rows] + [(row["time_s"], row["total_s"]) for row in called]
    return any(total_s and extra_s >= UNEVEN * total_s for extra_s, total_s in shares)


def step_j(record: RunRecord) -> float | None:
    """Return the energy of a step; None without a counter, or with a window that is too short for it."""
    rows = energy.ENERGY.of(record.results)
    return energy.step_j(rows[0]) if rows else None


def tokens_per_j(record: RunRecord) -> float | None:
    tokens, joules = first_row(record.results, "ran").get("tokens"), step_j(record)
    return tokens / joules if tokens and joules else None


def why_missing(goal: str, record: RunRecord) -> str:
    """Return why the record of a start lacks the number of a goal."""
    short = [row["window_s"] for row in energy.ENERGY.of(record.results) if row["energy_j"] is None]
    if goal in OF_ENERGY and short:
        return f"the timed steps take {human(short[0], 's')}, too short for the counter of joules; give more --steps"
    return GOALS[goal].missing


@dataclass(frozen=True)
class Goal:
    """Quantity that a search reduces, per trained token.

    Attributes:
        value: returns a record's number, of the same kind as that of the search's start; None if it is unknown.
        column: the column with this number in the table of trials; its suffix is the unit.
        judge: compares the records of two cells.
        word: the adjective after "2 times as", such as `fast`.
        missing: reason why a start may lack the number.
    """

    value: Callable[[RunRecord, RunRecord], float | None]
    column: str
    judge: Callable[[Records, Records, float, Iterable[Records], float], Judgement]
    word: str
    missing: str


NO_COUNTER = (
    "no counter of joules can be read here, NVML's on a GPU or RAPL's on a CPU (most systems let only root read it); "
    "use --goal time"
)
EFFICIENT = Goal(lambda record, start: step_j(record), "step_j", judge_energy, "energy-efficient", NO_COUNTER)
GOALS = {
    "time": Goal(step_s, "step_s", judge_time, "fast", "it has no valid time"),
    "memory": Goal(
        lambda record, start: peak_bytes(record),
        "peak_bytes",
        judge_memory,
        "small",
        "the device does not report its peak memory",
    ),
    "energy": EFFICIENT,
    "tokens-per-joule": EFFICIENT,
}
OF_ENERGY = ("energy", "tokens-per-joule")
