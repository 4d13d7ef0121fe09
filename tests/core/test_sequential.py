"""Sequential test of A against B: its error rates by enumeration and simulation, its limits, and its orders."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cs_systems.config import ConfigError
from cs_systems.core.sequential import Pair, SequentialTest, _Evidence

SIZES = (0.03, 0.5, 0.02, 0.02, 0.9, 0.0, 0.1, 0.04)


@pytest.mark.parametrize("above", [True, False])
def test_evidence_is_one_on_average_over_all_orders_of_equal_programs(above: bool) -> None:
    """A and B are the same: the times stay, and only the drawn order says which of a pair is B's."""
    total = 0.0
    for orders in itertools.product((True, False), repeat=len(SIZES)):
        evidence, chance, lead = _Evidence(0.0), 1.0, 0
        for size, a_first in zip(SIZES, orders, strict=True):
            chance_of_a = 0.5 if not lead else 2 / 3 if lead < 0 else 1 / 3
            drawn = chance_of_a if a_first else 1 - chance_of_a
            first, second = 1.0, math.exp(size)
            times = (first, second) if a_first else (second, first)
            evidence.add(Pair(*times, a_first, drawn))
            chance, lead = chance * drawn, lead + (1 if a_first else -1)
        logs = evidence._above if above else evidence._below
        total += chance * sum(map(math.exp, logs)) / len(logs)
    assert total == pytest.approx(1, abs=1e-12)


def two_speeds(source: random.Random) -> float:
    """Return a time of a program of two speeds, 8% apart, with a tail."""
    slow = 1.08 if source.random() < 0.4 else 1.0
    return slow * (1 + 0.005 * source.random()) * (1.5 if source.random() < 0.02 else 1)


def decided(source: random.Random, slowdown: float, find: float, pairs: int) -> str:
    test = SequentialTest(find, seed=source.randrange(1 << 30))
    for _ in range(pairs):
        first, second = two_speeds(source), two_speeds(source)
        if test.draw():
            test.add(first, second * slowdown)
        else:
            test.add(second, first * slowdown)
        if test.verdict != "undecided":
            break
    return test.verdict


def test_equal_programs_with_two_speeds_are_rarely_called_different() -> None:
    source = random.Random(0)
    verdicts = [decided(source, 1.0, 0.1, 60) for _ in range(300)]
    assert sum(verdict in ("slower", "faster") for verdict in verdicts) <= 6  # 2%: 1% and the chance of 300 trials
    assert verdicts.count("no difference") > 280


def test_slowdown_is_found_in_programs_with_two_speeds() -> None:
    source = random.Random(1)
    verdicts = [decided(source, 1.1, 0.1, 60) for _ in range(60)]
    assert verdicts.count("slower") >= 57


def quiet(slowdown: float, pairs: int, **options: object) -> SequentialTest:
    test, source = SequentialTest(seed=0, **options), random.Random(2)  # type: ignore[arg-type]
    for _ in range(pairs):
        test.draw()
        test.add(1 + 0.002 * source.random(), slowdown * (1 + 0.002 * source.random()))
    return test


def test_a_quiet_slowdown_is_shown_after_a_dozen_pairs() -> None:
    assert quiet(1.03, 7).verdict == "undecided"
    assert quiet(1.03, 7).standing().low is None
    found = quiet(1.03, 13).standing()
    assert found.verdict == "slower"
    assert found.low is not None
    assert found.high is not None
    assert found.resolution is not None
    assert 1.02 < found.low < 1.03 < found.high < 1.04
    assert found.ratio == pytest.approx(1.03, abs=0.002)
    assert 0.01 <= found.resolution < 0.02
    assert quiet(1 / 1.03, 13).verdict == "faster"


def test_verdict_always_comes_with_a_limit_of_its_interval() -> None:
    """Nine pairs with lucky orders refute equality, but no shift far away, where all differences have one size."""
    test = SequentialTest()
    chances = (1 / 2, 2 / 3, 1 / 2, 2 / 3, 1 / 2, 2 / 3, 1 / 2, 1 / 3, 1 / 3)
    for b, chance in zip((1.01, 1.01, 1.3, 1.5, 1.9, 1.9, 1.9, 1.9, 1.3), chances, strict=True):
        test.add_pair(Pair(1.0, b, True, chance))
    found = test.standing()
    assert found.verdict == "slower"
    assert found.low is not None
    assert found.low >= 1


def test_a_difference_below_one_percent_is_no_difference() -> None:
    assert quiet(1.005, 40).verdict == "no difference"


def test_one_sided_comparison_ends_once_that_direction_is_excluded() -> None:
    assert quiet(0.96, 9, asks=("slower",)).verdict == "not slower"
    assert quiet(1.2, 13, asks=("slower",)).verdict == "slower"
    assert quiet(1.02, 40, find=0.05).verdict == "slower"
    assert quiet(1.02, 40, find=0.05).is_excluded(1.05)
    assert not quiet(1.05, 40, find=0.05).is_excluded(1.05)


def test_orders_are_balanced_and_follow_the_seed() -> None:
    def orders(seed: int) -> list[bool]:
        test = SequentialTest(seed=seed)
        for _ in range(200):
            test.draw()
            test.add(1, 1)
        return [pair.a_first for pair in test.pairs]

    leads = [abs(sum(orders(seed)) - 100) for seed in range(20)]
    assert max(leads) <= 4
    assert orders(1) == orders(1) != orders(2)


def test_verdict_without_pairs_is_unknown() -> None:
    assert SequentialTest().standing() == ("undecided", None, None, None, None, 0)


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_impossible_times_are_refused(times: tuple[float, float]) -> None:
    test = SequentialTest()
    test.draw()
    with pytest.raises(ConfigError, match=r"the times of a pair are .* s; give finite times above 0"):
        test.add(*times)


def test_difference_to_find_below_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the difference to find is 0\.500%; give at least 1% and less than 1000%"):
        SequentialTest(0.005)
