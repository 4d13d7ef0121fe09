"""Judgement of a candidate compared with the best cell: a gain, no gain, or undecided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cs_systems.analysis.comparison.runs import processes
from cs_systems.core import statistics
from cs_systems.record import RunRecord

LEAST_GAIN = statistics.MINIMUM_EFFECT
MOST_PAIRS = 3  # most pairs of processes; without a clear difference by then, there is no gain
# The error of 5% is divided among the looks after each pair, so that the interval is valid at whichever pair a trial
# ends. The test of core/sequential.py assumes less, but takes at least 8 pairs, too many for a search of minutes.
CONFIDENCE = 1 - (1 - statistics.CONFIDENCE) / MOST_PAIRS


class Judgement(NamedTuple):
    """Ratio of the candidate to the best cell, below 1 for a gain, with its interval.

    is_gain: None while neither a gain nor its absence is certain.
    """

    is_gain: bool | None
    ratio: float
    low: float | None
    high: float | None


def judge_time(best: Sequence[RunRecord], candidate: Sequence[RunRecord], times: float = 1.0) -> Judgement:
    """Compare the steps of fresh processes, given one record each; `times`: the candidate's batch over the best's."""
    scaled = [[[step / times for step in steps] for steps in rounds] for rounds in processes(candidate, "step")]
    found = statistics.ratio_interval(processes(best, "step"), scaled, CONFIDENCE)
    if found.verdict == "faster":
        return Judgement(True, found.ratio, found.low, found.high)
    excludes = found.low is not None and found.low > 1 / (1 + LEAST_GAIN)
    return Judgement(False if excludes else None, found.ratio, found.low, found.high)


def judge_memory(best: Sequence[RunRecord], candidate: Sequence[RunRecord], times: float = 1.0) -> Judgement:
    """Compare the peaks, which equal processes repeat to the byte."""
    then, now = (max(peak_bytes(record) or 0 for record in records) for records in (candidate, best))
    ratio = then / now if now else 1.0
    return Judgement(ratio < 1 - LEAST_GAIN, ratio, ratio, ratio)


def peak_bytes(record: RunRecord) -> int | None:
    return record.measurement.peak_allocated_bytes if record.measurement else None


def step_s(record: RunRecord) -> float | None:
    return record.measurement.median_s() if record.measurement else None


JUDGES = {"time": judge_time, "memory": judge_memory}
