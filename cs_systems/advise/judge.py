"""Goals of a search, and the judgement of a candidate compared with the best cell: a gain, no gain, or undecided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from cs_systems.analysis.comparison.loop_findings import COLLECTIONS, SLOW_STEPS
from cs_systems.analysis.comparison.runs import processes
from cs_systems.core import statistics
from cs_systems.core.phases import Phase
from cs_systems.core.tables import first_row
from cs_systems.core.units import human
from cs_systems.formulas import energy
from cs_systems.record import RunRecord

LEAST_GAIN = statistics.MINIMUM_EFFECT
UNEVEN = 0.1  # share of a loop's time that steps of another kind take beyond a usual step
PLAIN = 2.0  # ratio of two processes that their variation does not explain, even on a busy host
FEW_PAIRS, MANY_PAIRS = 3, 12  # most pairs of processes of a trial, and of one to which the search comes back
PROOF_PAIRS = 40  # most pairs of the whole gain; usually its interval or the time ends it
PROOF_LEVEL = 0.98  # of its interval after each pair: as its width may end it, it holds the true ratio in 95%
LATER = 0.3  # share of the error that is kept for the pairs after the first few


def level_after(pair: int) -> float:
    """Return the level of the interval after a pair, counted from 1, so that a trial may end after any of them.

    The error of 5% is divided among the pairs of an option on one best cell; where another cell becomes the best, a
    trial begins anew. The test of core/sequential.py assumes less, but takes at least 8 pairs, too many for a search of
    minutes. The few processes of a cell hardly show how much they vary, so that the other cells' show it too.
    """
    error = 1 - statistics.CONFIDENCE
    if pair <= FEW_PAIRS:
        return 1 - (1 - LATER) * error / FEW_PAIRS
    return 1 - LATER * error / (MANY_PAIRS - FEW_PAIRS)


CONFIDENCE = level_after(1)


class Judgement(NamedTuple):
    """Ratio of the candidate to the best cell, below 1 for a gain, with its interval.

    is_gain: None while neither a gain nor its absence is certain.
    is_sure: False if the variation between processes is assumed, or taken from other programs, and the ratio is
        below PLAIN.
    """

    is_gain: bool | None
    ratio: float
    low: float | None
    high: float | None
    is_sure: bool = True


Records = Sequence[RunRecord]
Pairs = Sequence[tuple[RunRecord, RunRecord]]
Value = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class Seen:
    """Records of a candidate and of the best cell, and what else shows how much processes vary here.

    Attributes:
        best: records of the best cell.
        candidate: records of the candidate.
        times: the candidate's batch over the best's.
        others: the other records, by cell.
        pairs: records of best cell and candidate that were measured one right after the other.
        other_pairs: such pairs of other comparisons.
        confidence: the level of the interval.
    """

    best: Records
    candidate: Records
    times: float = 1.0
    others: Sequence[Records] = ()
    pairs: Pairs = ()
    other_pairs: Sequence[Pairs] = ()
    confidence: float = CONFIDENCE


def judge_time(seen: Seen) -> Judgement:
    """Compare the steps of fresh processes, given one record each.

    Where some steps do more, such as an evaluation, compare the mean step: the others hide what these steps gain.
    """
    is_mean = is_uneven(seen.best[0]) or is_uneven(seen.candidate[0])
    if found := _of_pairs(mean_s if is_mean else _median_s, seen):
        return found
    if is_mean:
        return _of_numbers(mean_s, seen)
    scaled = [
        [[step / seen.times for step in steps] for steps in rounds] for rounds in processes(seen.candidate, "step")
    ]
    varied = [processes(records, "step") for records in seen.others]
    compared = statistics.ratio_interval(processes(seen.best, "step"), scaled, seen.confidence, varied)
    is_sure = compared.unseen is None or max(compared.ratio, 1 / compared.ratio) >= PLAIN
    is_gain = True if compared.verdict == "faster" else _unless_excluded(compared.low)
    return Judgement(is_gain, compared.ratio, compared.low, compared.high, is_sure)


def judge_memory(seen: Seen) -> Judgement:
    """Compare the peaks, which equal processes repeat to the byte."""
    before, after = (max(peak_bytes(record) or 0 for record in records) for records in (seen.best, seen.candidate))
    ratio = after / before if before else 1.0
    return Judgement(ratio < 1 - LEAST_GAIN, ratio, ratio, ratio)


def judge_energy(seen: Seen) -> Judgement:
    """Compare the energy of a step."""
    return _of_pairs(step_j, seen) or _of_numbers(step_j, seen)


def _of_pairs(value: Value, seen: Seen) -> Judgement | None:
    """Compare one number per process within pairs; None if some processes have no pair, or the pairs are too few."""
    if len(seen.pairs) < len(seen.candidate):
        return None
    ratios = [_ratios(value, pairs) for pairs in (seen.pairs, *seen.other_pairs)]
    found = statistics.paired_ratio([each / seen.times for each in ratios[0]], seen.confidence, ratios[1:])
    if found is None or len(ratios[0]) < len(seen.pairs):
        return None
    is_gain = found.high < 1 and found.ratio <= 1 / (1 + LEAST_GAIN)
    is_sure = len(seen.pairs) > 1 or max(found.ratio, 1 / found.ratio) >= PLAIN
    return Judgement(is_gain or _unless_excluded(found.low), *found, is_sure)


def _ratios(value: Value, pairs: Pairs) -> list[float]:
    numbers = ((value(best), value(candidate)) for best, candidate in pairs)
    return [after / before for before, after in numbers if before and after]


def _of_numbers(value: Value, seen: Seen) -> Judgement:
    """Compare one number per process; one process a side shows no noise, and decides nothing if no others show it."""
    then, now = ([[[value(record) or 0.0]] for record in records] for records in (seen.best, seen.candidate))
    scaled = [[[number / seen.times for number in steps] for steps in rounds] for rounds in now]
    varied = [[[[number]] for record in records if (number := value(record))] for records in seen.others]
    found = statistics.ratio_interval(then, scaled, seen.confidence, varied)
    return Judgement(True if found.verdict == "faster" else None, found.ratio, found.low, found.high)


def _unless_excluded(low: float | None) -> bool | None:
    """Return False if the interval excludes a gain, else None."""
    return False if low is not None and low > 1 / (1 + LEAST_GAIN) else None


def peak_bytes(record: RunRecord) -> int | None:
    return record.measurement.peak_allocated_bytes if record.measurement else None


def step_s(record: RunRecord, start: RunRecord | None = None) -> float | None:
    """Return the median step; the mean where some steps do more, of the search's start if given."""
    if is_uneven(start or record):
        return mean_s(record)
    return _median_s(record)


def _median_s(record: RunRecord) -> float | None:
    return record.measurement.median_s() if record.measurement else None


def mean_s(record: RunRecord) -> float | None:
    return fmean(sample.wall_s for sample in record.measurement.timed) if record.measurement else None


def is_uneven(record: RunRecord) -> bool:
    """Return whether some steps do what others do not, such as an evaluation, in a notable part of a loop's time.

    It is at a known place of the loop's code, calls gc.collect, compiles, or waits for batches, which workers deliver
    in bursts; other slow steps may be noise.
    """
    rows = [row for row in SLOW_STEPS.of(record.results) if row.get("place") and row["steps"] > 1]
    called = [row for row in COLLECTIONS.of(record.results) if row["is_called"] and 1 < row["in_steps"] < row["steps"]]
    shares = [(row["extra_s"], row["total_s"]) for row in rows] + [(row["time_s"], row["total_s"]) for row in called]
    timed = record.measurement.timed if record.measurement else ()
    total_s = sum(sample.wall_s for sample in timed)
    shares.append((sum(sample.compile_s or 0.0 for sample in timed), total_s))
    shares.append((sum(sample.phases_s.get(Phase.INPUT, 0.0) for sample in timed), total_s))
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
        value: returns a record's number, of the same kind as the search's start has; None if it is unknown.
        column: the column with this number in the table of trials; its suffix is the unit.
        judge: compares the records of two cells.
        word: the adjective after "2 times as", such as `fast`.
        missing: reason why a start may lack the number.
    """

    value: Callable[[RunRecord, RunRecord], float | None]
    column: str
    judge: Callable[[Seen], Judgement]
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
