"""Limits of the imbalance of experts: all-to-alls of tokens, and computation between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.comparison.expert_work import _is_of_tokens, imbalance, tokens
from cs_systems.analysis.comparison.ranks import Match, Merged, Rank
from tests.analysis.comparison.test_limits import call, rank


def exchange(number: int, start_s: float, end_s: float, size: int = 1000, name: str = "all_to_all") -> Collective:
    return call(start_s, end_s, name=name, sequence=number, size_bytes=size)


def received(*elements: int) -> Match:
    calls = {number: call(0.0, 1.0, name="all_to_all", received=count) for number, count in enumerate(elements)}
    return Match(calls, dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 1.0))


def computing(number: int, *lasted_s: float, counts: bool = False) -> Rank:
    """Return a rank that computes for so long before each all-to-all; counts: of the tokens, sent before each."""
    calls, intervals, now = list[Collective](), list[tuple[float, float]](), 0.0
    for n, each_s in enumerate(lasted_s):
        intervals.append((now, now + each_s))
        now += each_s
        if counts:
            calls.append(exchange(2 * n, now, now + 0.125, size=9))
            now += 0.125
        calls.append(exchange(2 * n + 1, now, now + 0.125))
        now += 0.125
    return rank(number, *calls, computing=union(*np.array(intervals).T))


def job(ranks: Sequence[Rank], *matched: Collective) -> Merged:
    sizes = [call(0.0, 1.0, name="all_reduce", size_bytes=1 << 30), *matched]
    return Merged((*ranks,), tuple(Match({0: one}, {0: 0.0}, {0: 1.0}) for one in sizes), ())


def test_rank_without_tokens_receives_none() -> None:
    uneven = Merged((), (received(1, 0),), ())
    assert tokens(uneven) == {0: 1, 1: 0}
    assert imbalance(uneven, 0) == "receives 2 times the mean of all ranks in all-to-all"
    assert imbalance(uneven, 1) is None
    assert imbalance(uneven, 2) is None  # it is in no all-to-all


@pytest.mark.parametrize(
    ("name", "size", "is_of_tokens"),
    [("all_to_all", 10, True), ("all_to_all", 9, False), ("all_to_all", None, True), ("all_reduce", 10, False)],
)
def test_all_to_all_of_a_hundredth_of_the_largest_brings_tokens(
    name: str, size: int | None, is_of_tokens: bool
) -> None:
    assert _is_of_tokens(call(0.0, 1.0, name=name, size_bytes=size), 1000) is is_of_tokens


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ((1.0, 1.0, 1.0, 1.0), None),
        ((1.0, 2.0, 1.0, 2.0), "computes 1.6 times the mean of all ranks between two all-to-alls, and as long"),
        ((1.0, 2.0), "computes 1.6 times"),  # nothing is computed after the second all-to-all
        ((1.0, 2.0, 2.0, 2.0), None),  # its other work takes longer, too
    ],
)
@pytest.mark.parametrize("counts", [False, True])
def test_experts_compute_between_all_to_alls_of_tokens(last: Sequence[float], words: str | None, counts: bool) -> None:
    ranks = [*(computing(n, *[1.0] * len(last), counts=counts) for n in range(3)), computing(3, *last, counts=counts)]
    found = imbalance(job(ranks, exchange(0, 0.0, 1.0), exchange(1, 0.0, 1.0, size=9)), 3)
    assert (found or "").startswith(words or "")
    assert (found is None) is (words is None)


def test_rank_with_one_all_to_all_has_no_known_experts() -> None:
    ranks = [computing(0, 1.0), computing(1, 1.0, 1.0), computing(2, 1.0, 9.0)]
    assert imbalance(job(ranks, exchange(0, 0.0, 1.0)), 2) is None
