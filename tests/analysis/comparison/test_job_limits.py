"""Limits of the ranks of one job: which traces fit together, how their clocks align, and what a rank's time was for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.comparison.ranks import (
    _length_s,
    check,
    collective_rows,
    leading,
    merged,
    straggler,
    summary,
)
from cs_systems.config import ConfigError
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.made import PRODUCT, Made
from tests.analysis.comparison.test_limits import call, rank

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def calls(*starts: float) -> list[Collective]:
    return [call(start_s, start_s + 0.125) for start_s in starts]


def test_idle_time_of_a_rank_is_the_rest_of_its_step() -> None:
    made = Made()
    made.kernel(PRODUCT, 0.0, 0.25)
    made.kernel(NCCL, 0.5, 0.75)
    one = summary(replace(made.profile(), steps=(Step("step", 0.0, 1.0),)), 0)
    assert (one.step_s, one.compute_s, one.exposed_s, one.idle_s) == (1.0, 0.25, 0.25, 0.5)


def test_trace_lasts_until_its_last_kernel_or_range() -> None:
    made = Made()
    made.kernel(PRODUCT, 0.0, 1.0)
    made.range("step", 0.0, 2.0)
    assert _length_s(made.trace()) == 2.0


def test_computation_hides_a_part_of_the_waiting() -> None:
    """Rank 0 waits from 0 to 1 s, and computes in the first half of it."""
    job = merged([rank(0, call(0.0, 2.0), computing=union(np.array([0.0]), np.array([0.5]))), rank(1, call(1.0, 2.0))])
    assert job.times_of(job.ranks[0]) == (1.0, 1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("first", "second", "matched"),
    [
        ((0.0, 2.0, 5.0, 7.0), (1.0, 2.0, 4.0, 7.0), 2),  # as many fit as contradict each other
        ((0.0, 2.0, 5.0), (1.0, 2.0, 4.0), 0),
    ],
)
def test_collectives_are_matched_if_most_fit_together(
    first: Sequence[float], second: Sequence[float], matched: int
) -> None:
    job = merged([rank(0, *calls(*first)), rank(1, *calls(*second))])
    assert (len(job.matches), job.offset_s) == (matched, {0: 0.0, 1: 0.0})
    assert (job.notes[-1] == "left out: 2 matches in which a rank ends before another begins") is bool(matched)


def test_rank_may_end_when_another_begins_within_the_tolerance() -> None:
    others = [call(float(n), n + 0.5) for n in (2, 3)]
    job = merged([rank(0, call(-1.0, 0.0), *others), rank(1, call(100e-6, 0.5), *others)])
    assert len(job.matches) == 3


def test_clocks_are_aligned_through_a_rank_of_a_higher_number() -> None:
    """The clocks of ranks 1 and 2 are 5 s and 8 s ahead; both share collectives with the other alone, or with both."""
    job = merged([
        rank(0, call(0.0, 1.0, group="a")), rank(1, call(7.0, 8.0, group="b")),
        rank(2, call(8.0, 9.0, group="a"), call(10.0, 11.0, group="b")),
    ])  # fmt: skip
    assert job.offset_s == {0: 0.0, 1: 5.0, 2: 8.0}


def test_two_traces_of_a_rank_are_named() -> None:
    with pytest.raises(ConfigError, match=r"ranks of one job: 1\.json and 1\.json are both of rank 1; give one trace"):
        check([rank(0), rank(1), rank(1), rank(1)])


def test_recordings_are_compared_in_the_order_of_their_times() -> None:
    with pytest.raises(ConfigError, match=r"0\.json begins 70\.0 s after 1\.json ends"):
        check([rank(0, began_s=170.0), rank(1, began_s=0.0)])


def test_rank_without_collectives_waits_for_nobody() -> None:
    """Ranks 0 and 1 are last once each."""
    job = merged([rank(0, call(0.0, 0.5), call(1.25, 1.5)), rank(1, call(0.25, 0.5), call(1.0, 1.5)), rank(2)])
    assert leading(job).rank == 2
    late = straggler(merged([rank(0, call(0.0, 0.5)), rank(1, call(0.25, 0.5)), rank(2, compute_s=0.625)]))
    assert late is not None
    assert (late.rank, late.least_s) == (1, 0.75)


def test_other_numbers_of_steps_are_noted() -> None:
    notes = merged([rank(0, call(0.0, 1.0), steps=1), rank(1, call(0.0, 1.0), steps=2)]).notes
    assert notes[0] == "the ranks recorded different numbers of steps: 1, 2"


@pytest.mark.parametrize(
    ("name", "size", "lasts_s", "rate"),
    [
        ("all_reduce", 4, 0.5, 8.0),
        ("all_reduce", 4, 0.0, None),
        ("all_reduce", 0, 0.5, None),
        ("all_reduce", None, 0.5, None),
        ("barrier", 4, 0.5, None),
    ],
    ids=["known", "instant", "nothing sent", "unknown size", "no data"],
)
def test_bandwidth_needs_bytes_and_a_time(name: str, size: int | None, lasts_s: float, rate: float | None) -> None:
    own = call(0.0, lasts_s, name=name, size_bytes=size, group="a")
    (row,) = collective_rows(merged([rank(0, own), rank(1, own)]))
    assert (row["group"], row["algbw_bytes_per_s"], row["busbw_bytes_per_s"]) == ("a", rate, rate)
