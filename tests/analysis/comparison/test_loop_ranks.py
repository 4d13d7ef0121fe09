"""Tests of what the reports of a loop's ranks tell: who waits for whom, and what the ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON, OwnPythonRow
from cs_systems.analysis.comparison.loop_ranks import (
    COLLECTIVES,
    EXCHANGE,
    LATE_RANK,
    LOOP_RANKS,
    UNREDUCED,
    CallRow,
    RankReport,
    ReplicaReport,
    StepReport,
    tables_of,
)

MIB = 1 << 20


def call(time_s: float, name: str = "all_reduce", **values: Any) -> CallRow:
    row: CallRow = {"name": name, "group": "0", "ranks": 2, "size_bytes": 4 * MIB, "received": 0, "phase": "backward",
                    "time_s": time_s, "queued_s": 0.0, "is_gradients": False, "is_early": False, "place": None,
                    "callee": None, "option": None, "changed_bytes": None}  # fmt: skip
    return {**row, **values}  # type: ignore[typeddict-item]


def step(
    *calls: CallRow, queued_s: float = 0.0, passes: int = 1, search_s: float = 0.0, **phases_s: float
) -> StepReport:
    return {"wall_s": 1.0, "phases_s": {"forward": 0.3, "backward": 0.6, "other": 0.1} | phases_s, "calls": [*calls],
            "passes": passes, "search_s": search_s, "queued_s": queued_s}  # fmt: skip


def report(rank: int, steps: Sequence[StepReport], **values: Any) -> RankReport:
    row: RankReport = {"rank": rank, "steps": {str(number): each for number, each in enumerate(steps)}, "wrapper": "",
                       "parameter_bytes": 4 * MIB, "bucket_bytes": [], "marked": 0, "marking_s": 0.0, "unused": None,
                       "own_python": [], "elements": 100.0, "replicas": []}  # fmt: skip
    return {**row, **values}  # type: ignore[typeddict-item]


def python(function: str, time_s: float) -> OwnPythonRow:
    return {"phase": "other", "function": function, "place": "train.py:8", "calls": None, "time_s": time_s,
            "share": 1.0, "samples": 9}  # fmt: skip


def replica(*digests: str, **values: Any) -> ReplicaReport:
    row: ReplicaReport = {"model": "Net", "parameters": 4, "size_bytes": 10 * MIB, "ranks": [0, 1],
                          "steps": {str(number): each for number, each in enumerate(digests)}, "function": "main",
                          "place": "train.py:8"}  # fmt: skip
    return {**row, **values}  # type: ignore[typeddict-item]


def unreduced(first: Sequence[ReplicaReport], second: Sequence[ReplicaReport], *calls: CallRow) -> list[Any]:
    ranks = [report(n, 3 * [step(*calls)], replicas=[*each]) for n, each in enumerate((first, second))]
    return [*UNREDUCED.of(tables_of(ranks))]


def test_model_is_unreduced_if_its_weights_differ_in_three_steps() -> None:
    one, other, small = replica("a", "b", "c"), replica("d", "e", "f"), call(0.1, size_bytes=MIB - 1)
    row = {"model": "Net", "parameters": 4, "ranks": 2, "steps": 3, "function": "main", "place": "train.py:8"}
    assert unreduced([one], [other], small, call(0.1, is_gradients=True)) == [row]
    assert unreduced([one, one | {"model": "B"}], [one | {"model": "B"}, other]) == [row], "the order does not matter"


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        ([replica("a", "b", "c")], [replica("d", "e", "c")], []),
        ([replica("a", "b")], [replica("c", "d")], []),
        ([replica("a", "b", "c")], [], []),
        (2 * [replica("a", "b", "c")], 2 * [replica("d", "e", "f")], []),
        ([replica("a", "b", "c", ranks=[0])], [replica("d", "e", "f", ranks=[1])], []),
        ([replica("a", "b", "c")], [replica("d", "e", "f")], [call(0.1, size_bytes=MIB)]),
    ],
    ids=["averaged in a step", "2 steps", "called on a rank", "of two models", "not replicated", "exchanged"],
)
def test_model_is_not_unreduced(first: Any, second: Any, calls: Any) -> None:
    assert not unreduced(first, second, *calls)


def test_last_rank_delays_the_others_by_their_waiting_time() -> None:
    early = report(0, 4 * [step(call(0.5), forward=0.1, backward=0.8)])
    tables = tables_of([early, report(1, 4 * [step(call(0.1), forward=0.5, backward=0.4)], elements=400.0)])
    (late,) = LATE_RANK.of(tables)
    assert (late["rank"], late["work"], late["phase"], late["batch_times"]) == (1, "batch", "forward", 4.0)
    assert late["share"] == pytest.approx(0.4)
    assert [row["waiting_s"] for row in LOOP_RANKS.of(tables)] == pytest.approx([0.4, 0.0])
    assert EXCHANGE.of(tables)[0]["transfer_share"] == pytest.approx(0.1)


def test_ranks_that_take_turns_in_being_late_are_not_stragglers() -> None:
    one, other = step(call(0.4), backward=0.7), step(call(0.1), backward=0.4, forward=0.6)
    tables = tables_of([report(0, [one, other, one, other]), report(1, [other, one, other, one])])
    assert not LATE_RANK.of(tables)
    assert EXCHANGE.of(tables)[0]["transfer_share"] == pytest.approx(0.1)


def test_rank_that_only_waits_for_a_core_is_not_a_straggler() -> None:
    ranks = [report(0, 3 * [step(call(0.5))]), report(1, 3 * [step(call(0.1), queued_s=0.4)])]
    assert not LATE_RANK.of(tables_of(ranks))
    assert LATE_RANK.of(tables_of([ranks[0], report(1, 3 * [step(call(0.1))])]))


def test_straggler_is_found_although_the_other_rank_waits_for_a_core() -> None:
    """In two of five steps the rank with less work arrives last, because other programs had its core."""
    calm, busy = step(call(0.5)), step(call(0.1, queued_s=0.8), forward=0.7, queued_s=0.8)
    late = [step(call(0.1), forward=0.6, backward=0.3), step(call(0.5), forward=0.6, backward=0.7)]
    (found,) = LATE_RANK.of(tables_of([report(0, [calm, *2 * [calm, busy]]), report(1, [late[0], *2 * late])]))
    assert (found["rank"], found["last"], found["work"]) == (1, 5, "compute")
    assert found["share"] == pytest.approx(0.4)


def test_own_python_of_the_late_rank_is_kept_with_its_line() -> None:
    waits = report(0, 3 * [step(call(0.5), other=0.0)], own_python=[python("log", 0.05)])
    works = report(
        1, 3 * [step(call(0.1), other=0.4, backward=0.2)], own_python=[python("log", 0.05), python("f", 0.3)]
    )
    tables = tables_of([waits, works])
    (late,) = LATE_RANK.of(tables)
    assert (late["work"], late["function"], late["place"]) == ("python", "f", "train.py:8")
    assert OWN_PYTHON.of(tables) == works["own_python"]


def test_time_in_a_collective_does_not_count_as_work_of_its_phase() -> None:
    """A barrier outside of the phases is not the script's own Python."""
    barrier = call(0.3, "barrier", phase="other", size_bytes=0)
    tables = tables_of([report(rank, 2 * [step(barrier, other=0.35)]) for rank in (0, 1)])
    assert [row["other_s"] for row in LOOP_RANKS.of(tables)] == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize(("steps", "others"), [(1, 2), (2, 1)])
def test_one_common_step_is_not_enough_to_compare_ranks(steps: int, others: int) -> None:
    assert tables_of([report(0, steps * [step(call(0.5))]), report(1, others * [step(call(0.1))])]) == {}
    assert tables_of([report(0, 3 * [step(call(0.5))])]) == {}


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_source_that_works_longer_delays_those_that_receive(name: str) -> None:
    tables = tables_of([report(rank, 3 * [step(call(0.5 - 0.4 * rank, name))]) for rank in (0, 1)])
    assert [(row["rank"], row["share"]) for row in LATE_RANK.of(tables)] == [(1, pytest.approx(0.4))]
    assert [row["waiting_s"] for row in LOOP_RANKS.of(tables)] == [0.0, 0.0], "unknown, because the source goes on"


def test_source_that_goes_on_to_wait_itself_delays_nobody() -> None:
    """The others receive while it already waits for them in the next collective."""
    source, other = (step(call(first_s, "broadcast"), call(0.6 - first_s)) for first_s in (0.1, 0.5))
    assert not LATE_RANK.of(tables_of([report(0, 3 * [other]), report(1, 3 * [source])]))


def test_collectives_of_other_groups_are_not_matched() -> None:
    tables = tables_of([report(rank, 3 * [step(call(0.5, group=str(rank)))]) for rank in (0, 1)])
    assert EXCHANGE.of(tables)[0]["transfer_share"] == 0.0


def test_sends_and_receives_count_as_a_mean_of_the_ranks() -> None:
    tables = tables_of([report(rank, 2 * [step(call(0.2 + 0.2 * rank, "recv"))]) for rank in (0, 1)])
    assert EXCHANGE.of(tables)[0]["pairwise_share"] == pytest.approx(0.3)
    assert EXCHANGE.of(tables)[0]["transfer_share"] == 0.0


def test_early_all_reduces_of_buckets_and_of_a_script_are_counted() -> None:
    of_ddp = step(*(call(0.1, is_gradients=True, is_early=n < 2) for n in range(3)), passes=3)
    ranks = [
        report(rank, 2 * [of_ddp], wrapper="DistributedDataParallel", bucket_bytes=[3 * MIB, MIB]) for rank in (0, 1)
    ]
    row = EXCHANGE.of(tables_of(ranks))[0]
    assert (row["passes"], row["reduces"], row["early"]) == (3, 6, 4)
    assert row["early_share"] == pytest.approx(0.2)
    own = step(*(call(0.1, is_early=n < 2, phase="other") for n in range(3)), passes=3)
    row = EXCHANGE.of(tables_of([report(rank, 2 * [own]) for rank in (0, 1)]))[0]
    assert (row["reduces"], row["early"], row["early_share"]) == (3, 2, pytest.approx(0.2))


def test_early_all_reduces_of_metrics_do_not_count_as_gradients() -> None:
    own = step(call(0.1, is_early=True, phase="other", size_bytes=8), passes=3)
    assert EXCHANGE.of(tables_of([report(rank, 2 * [own]) for rank in (0, 1)]))[0]["early"] == 0


def test_all_reduces_of_divided_layers_do_not_count_as_gradients() -> None:
    layers = [call(0.01, phase=phase, size_bytes=64) for phase in ("forward", "backward") for _ in range(20)]
    row = EXCHANGE.of(tables_of([report(rank, 2 * [step(*layers)]) for rank in (0, 1)]))[0]
    assert (row["reduces"], row["small"], row["small_share"]) == (0, 0, 0.0)


@pytest.mark.parametrize(("count", "share"), [(7, 0.0), (8, 0.08)])
def test_few_small_calls_do_not_count_as_transfer(count: int, share: float) -> None:
    calls = [call(0.01, size_bytes=64, phase="other") for _ in range(count)]
    row = EXCHANGE.of(tables_of([report(rank, 2 * [step(*calls)]) for rank in (0, 1)]))[0]
    assert row["transfer_share"] == pytest.approx(share)
    assert row["small"] == count


def test_search_for_unused_parameters_counts_with_its_marks() -> None:
    searched = step(call(0.3, is_gradients=True), search_s=0.05, queued_s=0.5)
    values: Any = {"bucket_bytes": [64, 64], "marked": 600, "marking_s": 0.05, "unused": 0}
    row = EXCHANGE.of(tables_of([report(rank, 2 * [searched], **values) for rank in (0, 1)]))[0]
    assert row["search_share"] == pytest.approx(0.2)  # of the half in which the host had a core
    assert row["marks_share"] == pytest.approx(0.1)  # one of three all-reduces
    assert row["unused"] == 0


@pytest.mark.parametrize(("marked", "share"), [(0, 0.0), (600, 1.0)])
def test_steps_that_only_waited_for_a_core_have_a_share_of_searching(marked: int, share: float) -> None:
    waited = step(call(0.3), search_s=marked * 1e-4, queued_s=1.0)
    row = EXCHANGE.of(tables_of([report(rank, 2 * [waited], marked=marked) for rank in (0, 1)]))[0]
    assert row["search_share"] == share


def test_uneven_exchanges_show_the_rank_with_most_tokens() -> None:
    def of(rank: int) -> RankReport:
        received = 700 if rank else 100
        calls = call(0.01, "all_to_all", received=received), call(0.5 - 0.4 * rank, "all_to_all", received=400)
        return report(rank, 3 * [step(*calls, forward=0.1 + 0.4 * rank)])

    (late,) = LATE_RANK.of(tables_of([of(0), of(1)]))
    assert (late["rank"], late["received_times"]) == (1, pytest.approx(1.75))


def test_search_is_a_share_of_the_step_without_waits_for_a_slower_rank() -> None:
    """The other rank waits for a core meanwhile."""
    rows = [step(call(0.5), search_s=0.05, backward=0.6), step(call(0.1), search_s=0.05, queued_s=0.4)]
    reports = [report(rank, 3 * [row], marked=600, unused=0) for rank, row in enumerate(rows)]
    assert EXCHANGE.of(tables_of(reports))[0]["search_share"] == pytest.approx(0.05 / 0.6)


def test_transfers_are_added_up_by_line_and_gradients_together() -> None:
    sent = {"name": "broadcast", "phase": "forward", "option": "forward_sync_buffers", "size_bytes": 16 * MIB}
    metrics = {"name": "all_gather", "phase": "other", "size_bytes": 8, "callee": "dist.all_gather_object"}
    own = [call(0.125, is_gradients=True), call(0.0625, phase="other"), call(0.0625, phase="other")]
    steps = [
        [step(*own, call(0.25, **sent, place=f"train.py:{rank + 1}", changed_bytes=changed and rank * changed),
              *2 * [call(0.03125, **metrics, place="train.py:9")]) for changed in (None, MIB)]
        for rank in (0, 1)
    ]  # fmt: skip
    rows = COLLECTIVES.of(tables_of([report(rank, steps[rank]) for rank in (0, 1)]))
    assert [(row["name"], row["place"], row["count"], row["share"]) for row in rows] == [
        ("all_reduce", None, 3, 0.25),
        ("broadcast", "train.py:1", 1, 0.25),
        ("all_gather", "train.py:9", 2, 0.0625),
    ]
    assert [row["is_model_sized"] for row in rows] == [True, True, False]
    assert [(row["size_bytes"], row["are_gradients"], row["changed_bytes"]) for row in rows] == [
        (12 * MIB, True, None), (16 * MIB, False, MIB), (16, False, None),
    ]  # fmt: skip
