"""Time of a search, on a clock that the test moves."""

from __future__ import annotations

from cs_systems.advise.budget import Budgeted


class Bench(Budgeted):
    budget_s = 240.0

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = lambda: self.now
        self.__post_init__()


def test_no_trial_takes_the_time_of_the_others_or_of_the_proof() -> None:
    bench = Bench()
    assert bench.timeout_s() == 240.0  # of the start
    for seconds in (6.0, 5.0, 4.0):
        bench.took(seconds)
    bench.now += 15
    assert bench.timeout_s() == 60.0  # a quarter of all
    bench.now += 155
    assert bench.timeout_s() == 70.0 - 4 * 4.5
    bench.took(400.0)
    assert bench.process_s() == 5.0
    assert (bench.left_s(), bench.spent_s()) == (70.0, 170.0)


def test_records_of_an_earlier_search_are_read_whatever_time_a_process_is_assumed_to_take() -> None:
    bench = Bench()
    assert bench.process_s() == bench.first_s
    bench.knows()
    assert (bench.process_s(), bench.proof_s(is_kept=False)) == (0.0, 0.0)
    bench.took(6.0)
    bench.knows()
    assert (bench.process_s(), bench.proof_s(is_kept=False)) == (6.0, 24.0)


def test_usual_process_is_one_of_the_latest() -> None:
    bench = Bench()
    for seconds in (*[2.0] * 20, *[16.0] * 4):  # a compiler is kept
        bench.took(seconds)
    assert bench.process_s() == 16.0


def test_a_process_has_twice_the_usual_time_also_at_the_end() -> None:
    bench = Bench()
    for _ in range(3):
        bench.took(40.0)
    bench.now += 80
    assert bench.left_s() == 160.0  # for the proof alone
    assert bench.timeout_s() == 80.0


def test_a_short_budget_is_not_exceeded_by_a_trial_that_hangs() -> None:
    bench = Bench()
    bench.budget_s = 60.0
    bench.__post_init__()
    for _ in range(3):
        bench.took(2.0)
    assert bench.timeout_s() == 30.0
    bench.now += 50
    assert bench.timeout_s() == 10.0
    bench.now += 12
    assert bench.timeout_s() == 4.0  # twice the usual time, so that a process that was started may end


def test_time_added_for_the_diff_is_left_after_the_search() -> None:
    bench = Bench()
    bench.now += 230.0
    bench.extend(60.0)
    assert (bench.left_s(), bench.spent_s()) == (70.0, 230.0)


def test_a_kept_option_has_up_to_24_processes_of_proof_within_its_share() -> None:
    bench = Bench()
    bench.took(2.0)
    assert bench.proof_s(is_kept=False) == 4 * 2.0
    assert bench.proof_s(is_kept=True) == 24 * 2.0
    bench.took(15.0)
    assert bench.proof_s(is_kept=True) == 0.3 * 240.0
    bench.took(40.0)
    bench.took(40.0)
    assert bench.proof_s(is_kept=True) == bench.proof_s(is_kept=False) == 4 * 40.0
