"""Exact numbers of comparisons: sums that begin at 0, turns of ranks, ties, and the larger of two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.comparison import dtypes, precision, profiles
from cs_systems.analysis.comparison.late_ranks import is_uneven
from cs_systems.analysis.comparison.loop_growth import time_growth
from cs_systems.analysis.comparison.loop_ranks import _step
from cs_systems.analysis.comparison.loop_time import whole_loop_time
from cs_systems.analysis.comparison.rank_work import KERNELS, OPERATORS, Work, longer, works
from cs_systems.analysis.comparison.ranks import _length_s, leading, merged
from cs_systems.config import Precision
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.made import ADD, PRODUCT, Made
from tests.analysis.comparison import test_loop_ranks as loops
from tests.analysis.comparison.test_limits import call, rank
from tests.analysis.comparison.test_runs import BASE, record


def made() -> Any:
    """Return two steps with three kernels: two equal products, and an addition in the second step."""
    traced = Made()
    for name, start_s, end_s in ((PRODUCT, 0.0, 0.25), (PRODUCT, 1.0, 1.25), (ADD, 1.5, 1.625)):
        traced.kernel(name, start_s, end_s)
    return replace(traced.profile(), steps=(Step("step", 0.0, 1.0), Step("step", 1.0, 2.0)))


def test_works_of_a_rank_are_means_of_its_steps() -> None:
    found, _ = works(made())
    assert {name: work for (kind, name), work in found.items() if kind == KERNELS} == {
        "matmul": Work(0.25, 1.0, 132.0), "elementwise": Work(0.0625, 0.5, 66.0),
    }  # fmt: skip


def test_kernel_times_by_family_are_means_of_the_steps() -> None:
    assert profiles._times(made(), "family") == {"matmul": 0.25, "elementwise": 0.0625}


@pytest.mark.parametrize(("calls", "words"), [(102.0, "its operators take"), (102.1, "it runs more operators, 1.00 s")])
def test_rank_with_2_percent_more_operators_runs_more(calls: float, words: str) -> None:
    found = longer({(OPERATORS, ""): Work(2.0, calls)}, [{(OPERATORS, ""): Work(1.0, 100.0)}], 1.0)
    assert found is not None
    assert found.cause.startswith(words)


def test_empty_trace_has_no_length() -> None:
    assert _length_s(Made().trace()) == 0.0


@pytest.mark.parametrize(
    ("later_s", "spread"), [((0.0, 0.0, 0.25), "1.00 ns"), ((0.25, 0.0, -0.25), "250 ms"), ((0.0, 0.0, 0.0), "1.00 ns")]
)
def test_ends_of_collectives_agree_within_their_usual_distance(later_s: tuple[float, ...], spread: str) -> None:
    pairs = [(1.0, 1.5), (2.0, 2.75), (3.0, 3.5)]
    other = [call(start_s, end_s + later) for (start_s, end_s), later in zip(pairs, later_s, strict=True)]
    (note,) = merged([rank(0, *(call(*one) for one in pairs)), rank(1, *other)]).notes
    assert note.startswith("3 collectives are matched across the ranks, by order within the step; their ends agree")
    assert note.endswith(f"within {spread}")


def test_rank_delays_the_others_beyond_what_they_delay_it() -> None:
    """Rank 0 is last by 0.25 s, then rank 1 by 0.5 s."""
    first = loops.step(loops.call(0.0), loops.call(0.5), forward=0.0, backward=0.5, other=0.0)
    second = loops.step(loops.call(0.25), loops.call(0.0), forward=0.5, backward=0.25, other=0.0)
    found = _step({0: first, 1: second})
    assert (found.more_s(1), found.more_s(0)) == (0.25, -0.25)
    assert (found.own_s(0), found.own_s(1), found.more_work(0), found.more_work(1)) == (0.0, 0.5, 0.0, 1.0)


@pytest.mark.parametrize(("callers", "ranks", "matched"), [([0], 1, 0), ([0], 2, 0), ([0, 1], 3, 0), ([0, 1], 2, 1)])
def test_collective_is_matched_if_all_ranks_of_its_group_call_it(callers: list[int], ranks: int, matched: int) -> None:
    found = _step({n: loops.step(*[loops.call(0.25, ranks=ranks)] * (n in callers)) for n in (0, 1)})
    assert len(found.transfers) == matched


def test_equal_steps_are_no_growth() -> None:
    assert time_growth([*enumerate([1.0] * 6 + [2.0, 3.0, 4.0, 5.0])]) is None
    assert time_growth([*enumerate([1.0] * 5 + [2.0, 3.0, 4.0, 5.0, 6.0])]) is not None


def test_loop_below_a_second_is_divided_too() -> None:
    (row,) = whole_loop_time([0.125] * 4)
    assert (row["kind"], row["steps"], row["every"], row["total_s"], row["share"]) == ("usual", 4, None, 0.5, 1.0)


def test_peak_of_a_precision_is_the_largest_of_its_repeats() -> None:
    records = [record(BASE, 1.0), record(BASE, 1.0), record(BASE, 1.0)]
    repeats = [
        replace(one, measurement=replace(one.measurement, peak_allocated_bytes=size))  # type: ignore[type-var]
        for one, size in zip(records, (8, 9, None), strict=True)
    ]
    (row,) = precision.gains({Precision.FP32: repeats})
    assert row["peak_allocated_bytes"] == 9


def test_blocks_are_joined_by_their_first_number() -> None:
    rows: Any = [{"what": f"layers.{layer}.experts.{expert}.w"} for layer in (0, 1) for expert in (0, 2)]
    assert [row["what"] for row in dtypes.collapsed(rows)] == ["layers.0–1.experts.0.w", "layers.0–1.experts.2.w"]


@pytest.mark.parametrize(("times", "uneven"), [(None, False), (1.19, False), (1.2, True)])
def test_rank_is_uneven_from_1_2_times_the_mean_on(times: float | None, uneven: bool) -> None:
    assert is_uneven(times) is uneven


@pytest.mark.parametrize(("extra_s", "kind"), [(0.5, KERNELS), (0.4999, None)])
def test_kernels_that_take_half_of_the_lost_time_are_its_cause(extra_s: float, kind: str | None) -> None:
    found = longer({(KERNELS, "matmul"): Work(1.0 + extra_s)}, [{(KERNELS, "matmul"): Work(1.0)}], 1.0)
    assert (found and found.kind) == kind


def test_rank_that_waits_least_leads() -> None:
    ranks = [rank(0, call(0.25, 1.0)), rank(1, call(0.5, 1.0)), rank(2, call(0.0, 1.0))]
    assert leading(merged(ranks)).rank == 1


def test_buckets_of_a_model_of_unknown_size_are_not_early() -> None:
    calls = [loops.call(0.25, is_gradients=True, is_early=True)]
    reports = [loops.report(n, 4 * [loops.step(*calls)], bucket_bytes=[9], parameter_bytes=0) for n in (0, 1)]
    (row,) = loops.EXCHANGE.of(loops.tables_of(reports))
    assert (row["early"], row["early_share"], row["are_gradients"]) == (0, 0.0, True)


@pytest.mark.parametrize(
    ("workload", "profiler", "role"),
    [
        ("mine.py:step", "none", precision.TIMED), ("mine.py:step", "kineto", None),
        ("mine.py:step", "precision_error", precision.ERRORS), (precision.TIMED, "kineto", None),
        (precision.TIMED, "none", precision.TIMED),
    ],
)  # fmt: skip
def test_own_model_has_errors_under_a_profiler_that_compares(workload: str, profiler: str, role: str | None) -> None:
    made = record(replace(BASE, workload=workload, profiler=profiler, rounds=1), 1.0)  # type: ignore[arg-type]
    assert precision._role(made) == role
