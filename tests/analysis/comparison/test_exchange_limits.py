"""Limits of what the ranks of a loop exchange: small calls, gradients, layers, and lines with collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cs_systems.analysis.comparison.loop_ranks import COLLECTIVES, EXCHANGE, LOOP_RANKS, _Step, tables_of
from tests.analysis.comparison.test_loop_ranks import MIB, StepReport, call, report, step
from tests.analysis.comparison.test_rank_limits import exchange, late


def own(time_s: float = 0.0625, size_bytes: int = 4 * MIB, **known: Any) -> Any:
    """Return an all-reduce that the script calls outside of the phases."""
    return call(time_s, phase="other", size_bytes=size_bytes, **known)


def lines(*steps: StepReport, **known: Any) -> Any:
    return COLLECTIVES.of(tables_of([report(rank, steps, **known) for rank in (0, 1)]))


def test_rank_delays_the_others_by_more_than_any_of_them() -> None:
    found = _Step(1.0, {}, delay_s=Counter({0: 0.5, 1: 0.25, 2: 0.125}))  # type: ignore[arg-type]
    assert [found.more_s(rank) for rank in (0, 1, 2)] == [0.25, -0.25, -0.375]


def test_rank_that_waits_least_leads_where_no_rank_works_more() -> None:
    tables = tables_of([report(0, 3 * [step(call(0.5))]), report(1, 3 * [step(call(0.125), queued_s=0.5)])])
    assert [row["leads"] for row in LOOP_RANKS.of(tables)] == [False, True]


def test_work_that_explains_nothing_takes_no_longer() -> None:
    found = late(works={"forward": 0.1249, "other": 0.2}, elements=None)
    assert (found["work"], found["extra_share"]) == ("", 0.0)


def test_calls_of_the_first_rank_are_counted() -> None:
    reports = [report(rank, 2 * [step(call(0.25), passes=passes)]) for rank, passes in ((0, 2), (1, 1))]
    assert EXCHANGE.of(tables_of(reports))[0]["passes"] == 2


def test_step_without_a_backward_pass_has_small_calls() -> None:
    assert exchange(own(size_bytes=64), own(size_bytes=64), passes=0)["small"] == 2


def test_all_reduces_alone_are_counted_as_such() -> None:
    assert exchange(own(), own(name="all_gather"))["reduces"] == 1
    assert exchange(call(0.25, "broadcast", phase="forward"), call(0.25))["reduces"] == 1


@pytest.mark.parametrize(
    ("marked", "buckets", "share"),
    [(9, [64, 64], 0.0625), (9, [64, 2 * MIB], 0.0), (0, [64, 64], 0.0), (9, [], 0.0)],
    ids=["small buckets", "a large bucket", "no search", "no buckets"],
)
def test_marks_of_a_search_have_a_share_if_all_buckets_are_small(marked: int, buckets: list[int], share: float) -> None:
    assert exchange(call(0.1875, is_gradients=True), marked=marked, bucket_bytes=buckets)["marks_share"] == share


@pytest.mark.parametrize(
    ("calls", "buckets", "share"),
    [
        ([own(0.03125, 64)] * 4 + [call(0.03125, is_gradients=True)] * 2, [64, 64], 0.1875),
        ([own(0.03125, 64)] * 3 + [call(0.03125, is_gradients=True)] * 2, [64, 64], 0.0625),
        ([own(0.03125, 1)] * 8, [], 0.25),
        ([own(0.03125, 0, name="barrier")] * 8, [], 0.0),
        ([own(0.03125, 64)] * 7 + [own(0.03125, MIB)], [], 0.03125),
    ],
    ids=["4 and 2 × 2 buckets", "3 and 2 × 2 buckets", "8 of a byte", "8 without data", "7 below 1 MiB"],
)
def test_small_calls_are_transfer_if_they_are_many(calls: list[Any], buckets: list[int], share: float) -> None:
    assert exchange(*calls, bucket_bytes=buckets)["transfer_share"] == share


def test_all_reduce_of_1_mib_is_not_small() -> None:
    row = exchange(own(0.125, MIB), own(0.0625, 64))
    assert (row["small"], row["small_share"]) == (1, 0.0625)


def test_search_is_a_share_of_the_slowest_ranks_own_work() -> None:
    works = [step(forward=forward_s, backward=0.0, other=0.0, search_s=0.125) for forward_s in (0.5, 0.25)]
    reports = [report(rank, 2 * [one], marked=9) for rank, one in enumerate(works)]
    assert EXCHANGE.of(tables_of(reports))[0]["search_share"] == 0.25


# lines with collectives


def test_eight_lines_with_the_largest_shares_are_kept() -> None:
    calls = [own(0.03125 + n / 256, place=f"train.py:{n}", name="all_gather") for n in range(9)]
    assert [row["place"] for row in lines(*2 * [step(*calls)])] == [f"train.py:{n}" for n in range(8, 0, -1)]


@pytest.mark.parametrize(
    ("parameter_bytes", "is_model_sized"), [(8 * MIB, True), (8 * MIB + 2, False), (0, False)],
    ids=["half of them", "less", "unknown"],
)  # fmt: skip
def test_line_is_model_sized_if_it_sends_half_of_the_parameters(parameter_bytes: int, is_model_sized: bool) -> None:
    calls = 2 * [step(call(0.25, "all_gather"))]
    reports = [report(0, calls, parameter_bytes=parameter_bytes), report(1, calls, parameter_bytes=1)]
    assert COLLECTIVES.of(tables_of(reports))[0]["is_model_sized"] is is_model_sized


def test_lines_are_those_of_the_last_step() -> None:
    once, twice = step(own(place="a.py:1")), step(*2 * [own(place="a.py:1")], own(name="all_gather", place="a.py:2"))
    assert [(row["count"], row["place"]) for row in lines(once, once, twice)] == [(2, "a.py:1"), (1, "a.py:2")]


def test_all_reduces_of_layers_in_the_last_step_are_not_gradients() -> None:
    backward, layer = call(0.125), call(0.25, phase="forward")
    rows = lines(*2 * [step(backward, own())], step(layer, backward, own()))
    assert [(row["phase"], row["are_gradients"]) for row in rows] == [
        ("backward", False), ("other", True), ("forward", False),
    ]  # fmt: skip


def test_gradients_are_named_by_their_largest_call() -> None:
    (row,) = lines(*2 * [step(own(size_bytes=64), call(0.25), own(size_bytes=64))])
    assert (row["phase"], row["count"], row["are_gradients"]) == ("backward", 3, True)


def test_all_reduces_next_to_those_of_buckets_are_not_gradients() -> None:
    rows = lines(*2 * [step(call(0.25, is_gradients=True), own())], bucket_bytes=[4 * MIB])
    assert [(row["phase"], row["are_gradients"]) for row in rows] == [("backward", True), ("other", False)]
