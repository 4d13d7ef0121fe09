"""Interleaved pairs: their order, when they end, and failed processes, on a clock that costs no time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cs_systems.core.sequential import SequentialTest
from cs_systems.measure.runtime.pairs import Interleaved
from cs_systems.measure.runtime.program import Trial


class Machine:
    """Machine on which a process of A takes 1 s and one of B as long as `slowdown` says."""

    def __init__(self, slowdown: float = 1.0, fails: Callable[[str, int], bool] = lambda side, run: False) -> None:
        self.now_s, self._slowdown, self._fails, self.ran = 0.0, slowdown, fails, list[str]()

    def clock(self) -> float:
        return self.now_s

    def measure(self, side: str) -> Trial:
        self.ran.append(side)
        if self._fails(side, len(self.ran)):
            return Trial(None, "exited with status 1", has_failed=True)
        took_s = (self._slowdown if side == "B" else 1.0) + 1e-4 * len(self.ran)
        self.now_s += took_s
        return Trial(took_s)


def compared(machine: Machine, budget_s: float | None = None, most_pairs: int = 40) -> tuple[Interleaved, str]:
    test = SequentialTest(seed=0)
    pairs = Interleaved(machine.measure, test, most_pairs=most_pairs, budget_s=budget_s, clock=machine.clock)
    assert [ran.side for ran in pairs] == machine.ran
    return pairs, test.verdict


def test_pairs_start_with_either_side_and_stop_at_the_verdict() -> None:
    pairs, verdict = compared(machine := Machine(1.1))
    assert (pairs.ended, verdict) == ("the verdict is safe", "slower")
    both = [tuple(machine.ran[i : i + 2]) for i in range(0, len(machine.ran), 2)]
    assert both[0] == ("A", "B")  # not counted
    assert {*both[1:]} == {("A", "B"), ("B", "A")}
    assert len(both) <= 14


def test_no_pair_starts_if_it_would_exceed_the_time_limit() -> None:
    pairs, verdict = compared(machine := Machine(), budget_s=9.0)
    assert (pairs.ended, verdict) == ("the budget of 9 s is spent", "undecided")
    assert machine.now_s < 9
    assert len(machine.ran) == 8


@pytest.mark.parametrize(("first", "ran"), [(True, 6), (False, 4)])
def test_time_before_the_pairs_is_part_of_the_limit(first: bool, ran: int) -> None:
    machine = Machine()
    pairs = Interleaved(
        machine.measure, SequentialTest(), most_pairs=9, budget_s=9.0, first=first, spent_s=2.5, clock=machine.clock
    )
    assert len(list(pairs)) == ran
    assert 2.5 + machine.now_s < 9
    assert pairs.room() == 0


@pytest.mark.parametrize(("false_alarm", "fewest"), [(0.01, 10), (0.1, 6)])
def test_fewest_pairs_are_those_that_a_large_difference_takes(false_alarm: float, fewest: int) -> None:
    test = SequentialTest(false_alarm=false_alarm, seed=1)
    assert test.fewest_pairs == fewest
    while test.verdict == "undecided":
        test.draw()
        test.add(1.0, 50.0)
    assert abs(len(test.pairs) - fewest) <= 1


def test_comparison_ends_without_a_verdict_after_the_most_pairs() -> None:
    pairs, verdict = compared(Machine(), most_pairs=3)
    assert (pairs.ended, verdict) == ("the limit of 3 pairs is reached", "undecided")


def test_a_side_that_fails_at_once_is_not_tried_again() -> None:
    pairs, _ = compared(machine := Machine(fails=lambda side, run: side == "B"))
    assert pairs.ended == "B failed: exited with status 1"
    assert machine.ran == ["A", "B"]


@pytest.mark.parametrize(("fails", "ended"), [((5,), "the verdict is safe"), (range(5, 99), "3 pairs in a row failed")])
def test_failed_pairs_are_left_out(fails: tuple[int, ...], ended: str) -> None:
    pairs, verdict = compared(Machine(1.1, lambda side, run: run in fails))
    assert pairs.ended.startswith(ended)
    assert pairs.failed_pairs == (1 if ended.startswith("the") else 3)
    assert verdict == ("slower" if ended.startswith("the") else "undecided")
