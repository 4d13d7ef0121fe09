"""Limits of the comparison of ranks, of one rank's work, and of a user's strategy with one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.distribution import _early
from cs_systems.analysis.comparison.loop_ranks import EXCHANGE, LATE_RANK, LOOP_RANKS, RankReport, tables_of
from cs_systems.analysis.comparison.own_code import judged, same_as_one_process
from cs_systems.analysis.comparison.rank_work import INPUT, KERNELS, OPERATORS, PYTHON, Work, longer
from cs_systems.config import RunConfig
from cs_systems.record import RunRecord
from tests.analysis.comparison.test_loop_ranks import MIB, call, python, report, step

# who waits for whom


def late(**known: Any) -> Any:
    """Return the late rank of two, of which the second leaves each collective first; None if there is none."""
    waits = report(0, 4 * [step(call(0.5), **known.pop("waits", {"forward": 0.0, "backward": 0.5}))])
    works = {"forward": 0.25, "backward": 0.25} | known.pop("works", {})
    rank = report(1, 4 * [step(call(0.25), queued_s=known.pop("queued_s", 0.0), **works)], **known)
    return next(iter(LATE_RANK.of(tables_of([waits, rank]))), None)


@pytest.mark.parametrize(
    ("queued_s", "is_late"), [(0.0, True), (0.125 - 1 / 64, True), (0.25, False)], ids=["none", "less", "all"]
)
def test_rank_is_late_if_its_own_work_explains_half_of_the_delay(queued_s: float, is_late: bool) -> None:
    assert (late(queued_s=queued_s) is not None) is is_late


@pytest.mark.parametrize(("less_s", "is_late"), [(0.0, True), (1 / 64, False)])
def test_rank_that_delays_the_others_for_a_step_has_half_more_work(less_s: float, is_late: bool) -> None:
    waits = report(0, 2 * [step(call(1.0), forward=0.25, backward=1.0, other=0.0)])
    works = report(1, 2 * [step(call(0.0), forward=0.25, backward=0.25 - less_s, other=0.0)])
    assert bool(LATE_RANK.of(tables_of([waits, works]))) is is_late


@pytest.mark.parametrize(("last", "count", "is_late"), [(3, 4, True), (2, 4, False), (3, 5, False), (4, 5, True)])
def test_rank_is_late_if_it_is_the_last_in_three_of_four_steps(last: int, count: int, is_late: bool) -> None:
    early, slow = step(call(0.5), forward=0.0, backward=0.5), step(call(0.25), forward=0.5, backward=0.25)
    order = [slow] * last + [early] * (count - last)
    tables = tables_of([report(0, [early if one is slow else slow for one in order]), report(1, order)])
    (row, *_) = LATE_RANK.of(tables) or [None]
    assert (row is not None) is is_late
    if row is not None:
        assert (row["rank"], row["last"], row["steps"], row["share"]) == (1, last, count, 0.25)


@pytest.mark.parametrize(
    ("elements", "work"),
    [(120.0, "batch"), (119.0, "compute"), (None, "compute")],
    ids=["1.2 times", "less", "unknown"],
)
def test_batch_of_1_2_times_the_others_explains_more_work(elements: float | None, work: str) -> None:
    found = late(elements=elements)
    assert (found["work"], found["phase"], found["extra_share"]) == (work, "forward", 0.25)


@pytest.mark.parametrize(
    ("works", "work"),
    [
        ({"forward": 0.125, "other": 0.225}, "compute"),  # half of the delay
        ({"forward": 0.1249, "other": 0.2}, ""),
        ({"forward": 0.0, "other": 0.5}, "python"),
        ({"forward": 0.0, "other": 0.1, "input": 0.5}, "input"),
        ({"forward": 0.0, "other": 0.25, "input": 0.5}, "input"),
    ],
)
def test_kind_of_work_that_explains_half_of_the_delay_is_its_cause(works: dict[str, float], work: str) -> None:
    assert late(works=works, elements=None)["work"] == work


def test_function_with_most_more_time_than_the_others_is_named() -> None:
    rows = [python("common", 0.5), python("own", 0.4), {**python("nowhere", 0.9), "place": ""}]
    waits = report(0, 4 * [step(call(0.5), other=0.0)], own_python=[python("common", 0.3)])
    works = report(1, 4 * [step(call(0.25), other=0.5, backward=0.25)], own_python=rows)
    third = report(2, 4 * [step(call(0.5), other=0.0)], own_python=[python("common", 0.5)])
    calls = [{**one["steps"]["0"]["calls"][0], "ranks": 3} for one in (waits, works, third)]
    for one, of_rank in zip((waits, works, third), calls, strict=True):
        for each in one["steps"].values():
            each["calls"] = [of_rank]  # type: ignore[list-item]
    (row,) = LATE_RANK.of(tables_of([waits, works, third]))
    assert (row["rank"], row["work"], row["function"], row["share"]) == (1, "python", "own", 0.25)


@pytest.mark.parametrize(("common", "wall_s", "is_compared"), [(2, 1.0, True), (1, 1.0, False), (2, 0.0, False)])
def test_ranks_are_compared_in_two_common_steps_that_last(common: int, wall_s: float, is_compared: bool) -> None:
    steps = [{**step(call(0.25)), "wall_s": wall_s if number == 0 else 1.0} for number in range(common)]
    tables = tables_of([report(rank, steps) for rank in (0, 1)])  # type: ignore[arg-type]
    assert bool(tables) is is_compared


def test_rows_of_ranks_are_lower_medians_of_their_steps() -> None:
    steps = [step(call(wait_s), call(0.25, "send"), other=other_s) for wait_s, other_s in ((0.5, 0.5), (0.75, 0.25))]
    tables = tables_of([report(0, steps), report(1, [step(call(0.25), other=0.5)] * 2)])
    assert [
        (row["steps"], row["waiting_s"], row["pairwise_s"], row["other_s"], row["leads"])
        for row in LOOP_RANKS.of(tables)
    ] == [(2, 0.25, 0.25, 0.25, False), (2, 0.0, 0.0, 0.5, True)]
    (row,) = EXCHANGE.of(tables)
    assert row["pairwise_share"] == 0.125


def test_step_lasts_as_long_as_on_the_slowest_rank() -> None:
    fast, slow = {**step(call(0.25)), "wall_s": 0.5}, {**step(call(0.25)), "wall_s": 1.0}
    (row,) = EXCHANGE.of(tables_of([report(0, [slow, fast, slow]), report(1, [fast, slow, fast])]))  # type: ignore[list-item]
    assert row["transfer_share"] == 0.25


def test_calls_are_counted_in_the_last_step() -> None:
    steps = [step(call(0.25, phase="other"), passes=1), step(), step(*2 * [call(0.25, phase="other")], passes=2)]
    (row,) = EXCHANGE.of(tables_of([report(rank, steps) for rank in (0, 1)]))
    assert (row["reduces"], row["passes"]) == (2, 2)


# exchanges


def exchange(*calls: Any, passes: int = 1, search_s: float = 0.0, queued_s: float = 0.0, **known: Any) -> Any:
    steps = 2 * [step(*calls, passes=passes, search_s=search_s, queued_s=queued_s)]
    reports: list[RankReport] = [report(rank, steps, **known) for rank in (0, 1)]
    return EXCHANGE.of(tables_of(reports))[0]


@pytest.mark.parametrize(("size_bytes", "share"), [(MIB - 1, 0.0), (MIB, 0.0625)], ids=["less than 1 MiB", "1 MiB"])
def test_all_reduce_is_small_below_1_mib(size_bytes: int, share: float) -> None:
    row = exchange(call(0.0625, size_bytes=size_bytes, phase="other"))
    assert row["transfer_share"] == share
    assert (row["small"], row["small_share"]) == ((0, 0.0) if share else (1, 0.0625))
    assert row["small_bytes"] == (0.0 if share else MIB - 1)


@pytest.mark.parametrize(("large", "share"), [(2, 0.125), (3, 0.0)])
def test_small_all_reduces_count_if_half_of_all_are(large: int, share: float) -> None:
    sizes = [64, 64, *large * [4 * MIB]]
    row = exchange(*(call(0.0625, size_bytes=size, phase="other") for size in sizes), passes=2)
    assert (row["small"], row["small_share"], row["reduces"]) == (1, share, 2 + large)


@pytest.mark.parametrize(("parameter_bytes", "early"), [(8 * MIB, 1), (8 * MIB + 2, 0), (0, 0)])
def test_all_reduces_with_half_of_the_parameters_count_as_gradients(parameter_bytes: int, early: int) -> None:
    row = exchange(call(0.25, phase="other", is_early=True), parameter_bytes=parameter_bytes)
    assert (row["are_gradients"], row["early"], row["early_share"]) == (bool(early), early, 0.25 * early)


def test_buckets_of_a_wrapper_count_for_each_of_its_calls() -> None:
    calls = [call(0.125, is_gradients=True, is_early=number == 0, size_bytes=4 * MIB) for number in range(2)]
    row = exchange(*calls, passes=2, bucket_bytes=[64, 64, 2 * MIB], parameter_bytes=4 * MIB)
    assert (row["reduces"], row["early"], row["early_share"], row["small"]) == (6, 3, 0.125, 2)
    assert (row["small_bytes"], row["small_share"], row["marks_share"]) == (64.0, 0.25, 0.0)


def test_transfer_is_the_lower_quartile_of_the_steps() -> None:
    steps = [step(call(share)) for share in (0.5, 0.25, 0.125, 0.375)]
    tables = tables_of([report(rank, steps) for rank in (0, 1)])
    assert EXCHANGE.of(tables)[0]["transfer_share"] == 0.25


def test_search_time_is_the_least_of_all_ranks_that_had_a_core() -> None:
    known: Any = {"marked": 9, "marking_s": 0.0625, "bucket_bytes": [64]}
    row = exchange(call(0.25, is_gradients=True), search_s=0.0625, queued_s=0.5, unused=3, **known)
    assert (row["search_share"], row["marks_share"], row["unused"]) == (pytest.approx(0.25), 0.125, 3)
    assert exchange(call(0.25), search_s=0.5, queued_s=0.75, **known)["search_share"] == 1.0
    assert exchange(call(0.25), search_s=0.5)["search_share"] == 0.0
    searches = [report(rank, 2 * [step(call(0.25), search_s=0.25 * (1 + rank))], marked=9) for rank in (0, 1)]
    assert EXCHANGE.of(tables_of(searches))[0]["search_share"] == pytest.approx(0.25)


# one rank's work


def told(own: Mapping[tuple[str, str], Work], others: list[Mapping[tuple[str, str], Work]], lost_s: float = 2.0) -> str:
    found = longer(own, others, lost_s)
    return found.cause if found else ""


GEMM, ADD, LOADS = (KERNELS, "matmul"), (KERNELS, "elementwise"), (INPUT, "")


@pytest.mark.parametrize(
    ("own", "usual", "cause"),
    [
        ({GEMM: Work(2.0, 50.0, 100.0)}, {GEMM: Work(1.0, 50.0, 100.0)}, "the same kernels take 1.00 s longer (most"),
        ({GEMM: Work(1.99, 50.0, 100.0)}, {GEMM: Work(1.0, 50.0, 100.0)}, ""),
        ({GEMM: Work(2.0, 51.0, 100.0)}, {GEMM: Work(1.0, 50.0, 100.0)}, "the same kernels take 1.00 s longer"),
        ({GEMM: Work(2.0, 75.0, 100.0)}, {GEMM: Work(1.0, 50.0, 100.0)}, "it runs 1.5 times as many kernels (most in"),
        ({GEMM: Work(2.0, 50.0, 102.0)}, {GEMM: Work(1.0, 50.0, 100.0)}, "the same kernels take 1.00 s longer"),
        ({GEMM: Work(2.0, 50.0, 150.0)}, {GEMM: Work(1.0, 50.0, 100.0)}, "its kernels have 1.5 times as many blocks"),
        ({GEMM: Work(2.0, 50.0, 150.0)}, {GEMM: Work(1.0, 50.0, 0.0)}, "the same kernels take 1.00 s longer"),
        ({GEMM: Work(2.0, 50.0, 9.0)}, {}, "it runs kernels of matmul that the others do not, 2.00 s longer"),
        ({GEMM: Work(2.0), ADD: Work(3.0)}, {GEMM: Work(1.0), ADD: Work(1.0)}, 
         "the same kernels take 3.00 s longer (most in elementwise)"),
        ({GEMM: Work(2.0, 50.0, 1.0)}, {GEMM: Work(1.0, 50.0, 0.5)}, "its kernels have 2 times as many blocks"),
        ({GEMM: Work(2.5), ADD: Work(1.0)}, {GEMM: Work(1.0), ADD: Work(2.0)}, ""),  # 0.5 s longer in all
        ({LOADS: Work(2.0)}, {LOADS: Work(1.0)}, "it waits 1.00 s longer for its batch"),
        ({LOADS: Work(1.99)}, {LOADS: Work(1.0)}, ""),
        ({(OPERATORS, ""): Work(2.0, 51.0)}, {(OPERATORS, ""): Work(1.0, 50.0)}, "its operators take 1.00 s longer"),
        ({(OPERATORS, ""): Work(2.0, 52.0)}, {(OPERATORS, ""): Work(1.0, 50.0)}, "it runs more operators, 1.00 s"),
        ({(PYTHON, "log"): Work(1.0), LOADS: Work(0.5)}, {}, "its host is 1.00 s longer in 'log'"),
        ({(PYTHON, ""): Work(1.0), GEMM: Work(0.99)}, {}, "its host is 1.00 s longer in Python between operators"),
        ({}, {}, ""),
    ],
)  # fmt: skip
def test_work_that_explains_half_of_the_delay_is_its_cause(
    own: dict[tuple[str, str], Work], usual: dict[tuple[str, str], Work], cause: str
) -> None:
    assert told(own, [usual, usual]).startswith(cause)
    assert bool(told(own, [usual, usual])) is bool(cause)


def collective(launched_s: float, name: str = "all_reduce") -> Collective:
    return Collective("step", name, "0", 2, None, 64, launched_s, launched_s + 1, 0.0, {}, launched_s)


def test_all_reduce_is_early_if_no_update_comes_before_the_next_pass() -> None:
    """Passes begin at 1, 3, 5 and 7, and the weights are updated at 4.5."""
    calls = [collective(at) for at in (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.9, 7.0, 8.0)] + [collective(2.0, "broadcast")]
    assert [call.launched_s for call in _early(calls, [1.0, 3.0, 5.0, 7.0], [4.5])] == [1.0, 2.0, 5.0, 6.9]
    assert _early(calls, [1.0, 3.0], [3.0]) == []


# a strategy of the user's own


def compared(error: float | None, between: float | None, loss: float | None = None) -> Any:
    return {"strategy": "mine", "ranks": 2, "steps": 4, "error": error, "between_ranks": between, "loss_error": loss,
            "begins_equal": True, "note": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "same"),
    [
        (compared(1e-4, 0.0), "yes"),
        (compared(0.0, 1.01e-4), "in low precision"),
        (compared(2e-2, 1e-4), "in low precision"),
        (compared(0.0, 2.01e-2), "no"),
        (compared(math.nan, 0.0), "no"),
        (compared(None, 0.0, 1e-5), "yes"),
        (compared(0.0, None, 1.01e-5), "no"),
        (compared(None, None), "failed"),
        (compared(None, 0.0), "failed"),
    ],
)
def test_strategy_equals_one_process_within_the_limits(row: Any, same: str) -> None:
    assert same_as_one_process(row) == same


def test_strategy_with_failing_code_has_a_row() -> None:
    config = RunConfig(workload="strategy_error", strategy="ddp_flat", world_size=2)
    rows = judged([
        RunRecord("key", config.to_dict(), "error", reason="KeyError"), RunRecord("key", config.to_dict(), "timeout"),
        RunRecord("key", RunConfig().to_dict(), "ok"),
    ])  # fmt: skip
    assert [(row["steps"], row["ranks"], row["note"], row["same"]) for row in rows] == [
        (0, 2, "KeyError", "failed"), (0, 2, "timeout", "failed"),
    ]  # fmt: skip
