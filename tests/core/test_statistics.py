"""Statistics compared with numpy, with published tables and with simulated machines."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.core import statistics as stats
from cs_systems.core.validation import ConfigError

DURATIONS = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=50)


@given(DURATIONS, st.floats(0, 1))
def test_quantile_matches_numpy(samples: list[float], q: float) -> None:
    assert stats.quantile(samples, q) == pytest.approx(float(np.quantile(samples, q)), rel=1e-12)


@given(DURATIONS)
def test_summary_matches_numpy(samples: list[float]) -> None:
    got = stats.summary(samples)
    assert got.n == len(samples)
    assert got.median == pytest.approx(float(np.median(samples)))
    assert got.mean == pytest.approx(float(np.mean(samples)))
    assert (got.min, got.max) == (min(samples), max(samples))
    assert got.min <= got.p10 <= got.median <= got.p90 <= got.max
    if len(samples) == 1:
        assert got.std is None
    else:
        assert got.std == pytest.approx(float(np.std(samples, ddof=1)), abs=1e-9)
    if got.low is not None and got.high is not None:
        assert got.low <= got.median <= got.high


@pytest.mark.parametrize(("values", "expected"), [([], 0), ([1, 2], 3), ([0.5, 1.0], 1.5), ([1, None], None)])
def test_total_is_unknown_if_a_value_is_unknown(values: list[float | None], expected: float | None) -> None:
    assert stats.total(iter(values)) == expected


def test_summary_of_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no sample to summarize; give"):
        stats.summary([])


@pytest.mark.parametrize(
    ("n", "ranks"), [(5, None), (6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (30, (10, 21)), (100, (40, 61))]
)
def test_median_interval_matches_published_values(n: int, ranks: tuple[int, int] | None) -> None:
    """Conover, Practical Nonparametric Statistics, table A3 (p = ½, 95%)."""
    assert stats.median_interval(range(1, n + 1)) == ranks


def test_median_interval_covers_the_median() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(1000):
        low, high = stats.median_interval([rng.lognormvariate(0, 1) for _ in range(15)]) or (1, 1)
        hits += low <= 1 <= high
    assert hits >= 935


@pytest.mark.parametrize(
    ("p", "dof", "expected"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.30265273),
        (0.975, 9, 2.26215716),
        (0.995, 4, 4.60409487),
        (0.975, 30, 2.04227246),
        (0.975, 120, 1.97993041),
        (0.975, 1.7, 5.11883899),
        (0.95, 6.4, 1.92164503),
        (0.975, 1e5, 1.9599877),
        (0.975, float("inf"), 1.95996398),
    ],
)
def test_student_t_matches_published_values(p: float, dof: float, expected: float) -> None:
    assert stats.student_t(p, dof) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("p", [0.5, 0.6, 0.95, 0.995])
def test_student_t_matches_its_closed_forms(p: float) -> None:
    """Compare with 1, 2 and 4 degrees of freedom, of which the quantile has a formula."""
    free = 4 * p * (1 - p)
    of_four = 2 * math.sqrt(max(math.cos(math.acos(math.sqrt(free)) / 3) / math.sqrt(free) - 1, 0))
    expected = {1: math.tan(math.pi * (p - 0.5)), 2: (2 * p - 1) * math.sqrt(2 / free), 4: of_four}
    for dof, value in expected.items():
        assert stats.student_t(p, dof) == pytest.approx(value, rel=1e-9, abs=1e-7)


@given(st.floats(1, 1e7), st.floats(1, 1e7))
def test_student_t_decreases_with_degrees_of_freedom(a: float, b: float) -> None:
    few, many = sorted((a, b))
    assert stats.student_t(0.975, few) >= stats.student_t(0.975, many) - 1e-6
    assert 1.9599 < stats.student_t(0.975, many) < 12.7063


def test_interval_by_rounds_covers_correlated_samples() -> None:
    """Give the 20 samples of a round 2% of common noise; as independent samples their interval is too narrow."""
    rng = random.Random(2)
    by_rounds = as_independent = 0
    for _ in range(300):
        rounds = [process(rng, 1.0, between=0.0, rounds=1, steps=20, noise=0.002)[0] for _ in range(5)]
        rounds = [[s * np.exp(shift) for s in r] for r, shift in zip(rounds, rng_normals(rng, 5, 0.02), strict=True)]
        low, high, caveat = stats.interval(rounds)
        assert caveat is None
        by_rounds += low is not None and high is not None and low <= 1 <= high
        low, high, caveat = stats.interval([[s for r in rounds for s in r]])
        assert caveat == "of fewer than 3 rounds the samples are taken as independent: measure with --rounds 3"
        as_independent += low is not None and high is not None and low <= 1 <= high
    assert by_rounds >= 0.93 * 300
    assert as_independent < 0.85 * 300


@pytest.mark.parametrize(("rounds", "steps", "apart"), [(3, 10, 0.01), (5, 20, 0.02), (10, 3, 0.01), (20, 5, 0.02)])
def test_interval_covers_the_median_of_rounds_that_differ(rounds: int, steps: int, apart: float) -> None:
    rng, hits = random.Random(3), 0
    for _ in range(600):
        shifted = [
            [sample * math.exp(shift) for sample in process(rng, 1.0, 0.0, 1, steps, noise=0.002)[0]]
            for shift in rng_normals(rng, rounds, apart)
        ]
        low, high, _ = stats.interval(shifted)
        assert low is not None
        assert high is not None
        assert low <= stats.median([shifted]) <= high
        hits += low <= 1 <= high
    assert hits >= 0.935 * 600


def test_interval_of_too_few_samples_is_unknown() -> None:
    assert stats.interval([[1.0, 1.1]])[:2] == (None, None)


def rng_normals(rng: random.Random, n: int, sd: float) -> list[float]:
    return [rng.gauss(0, sd) for _ in range(n)]


def process(
    rng: random.Random, scale: float, between: float, rounds: int = 5, steps: int = 10, noise: float = 0.01
) -> list[list[float]]:
    """Return samples of a simulated process: its level, shifts of rounds, AR(1) noise in rounds, 3% Pareto outliers."""
    level, found = scale * np.exp(rng.gauss(0, between)), []
    for _ in range(rounds):
        shift, error, samples = rng.gauss(0, noise / 3), 0.0, []
        for _ in range(steps):
            error = 0.5 * error + rng.gauss(0, noise * 0.75**0.5)
            late = 1 + 0.1 * rng.paretovariate(1.5) if rng.random() < 0.03 else 1.0
            samples.append(float(level * np.exp(error + shift) * late))
        found.append(samples)
    return found


def verdicts(processes: int, between: float, slowdown: float, trials: int = 200) -> list[str]:
    rng = random.Random(7)

    def side(scale: float) -> list[list[list[float]]]:
        return [process(rng, scale, between) for _ in range(processes)]

    return [stats.ratio_interval(side(1.0), side(slowdown)).verdict for _ in range(trials)]


@pytest.mark.parametrize(("processes", "between"), [(1, 0.002), (1, 0.005), (2, 0.005), (3, 0.01), (5, 0.01)])
def test_verdict_finds_five_percent_without_false_differences(processes: int, between: float) -> None:
    assert verdicts(processes, between, 1.0).count("no difference") >= 0.95 * 200
    assert verdicts(processes, between, 1.05).count("slower") >= 0.95 * 200
    assert verdicts(processes, between, 1 / 1.05).count("faster") >= 0.95 * 200


def test_repeats_replace_the_assumed_variance_between_processes() -> None:
    """On a machine that varies by 3% between processes, repeats keep false alarms rare at the cost of power."""
    assert verdicts(3, 0.03, 1.0).count("no difference") >= 0.9 * 200
    assert verdicts(1, 0.03, 1.0).count("no difference") < 0.7 * 200, "one process a side cannot detect it"


def test_one_process_per_side_names_the_unmeasured_variance() -> None:
    rng = random.Random(3)
    one, other = process(rng, 1, 0.0), process(rng, 1, 0.0)
    single = stats.ratio_interval([one], [other])
    assert single.unseen == (
        "the variance between processes, because a run used one process; 0.95% is assumed; measure it with "
        "--repeats 3, or record a loop three times into one folder"
    )
    assert single.resolution is not None
    assert 0.025 < single.resolution < 0.05
    assert stats.ratio_interval([one, other], [one, other]).unseen is None


def test_interval_names_its_source_of_noise() -> None:
    one_round, three = [[1.0, 1.1, 1.2]], [[1.0], [1.1], [1.2]]
    assert stats.ratio_interval([three], [three]).noise == "rounds"
    assert stats.ratio_interval([three], [one_round]).noise == "thirds of the steps, of fewer than 3 rounds"
    assert stats.ratio_interval([three] * 2, [three] * 2).noise == "processes and rounds"


def test_ratio_is_symmetric() -> None:
    rng = random.Random(4)
    fast, slow = [process(rng, 1, 0.001)], [process(rng, 1.2, 0.001)]
    forth, back = stats.ratio_interval(fast, slow), stats.ratio_interval(slow, fast)
    assert (forth.verdict, back.verdict) == ("slower", "faster")
    assert forth.ratio == pytest.approx(1.2, rel=0.02)
    assert forth.ratio * back.ratio == pytest.approx(1)
    assert forth.low is not None
    assert back.high is not None
    assert forth.low * back.high == pytest.approx(1)


def test_difference_below_the_minimum_is_no_difference() -> None:
    """Use 0.5% without noise in 20 processes a side: certain, but no more than clocks vary."""
    found = stats.ratio_interval([[[1.0] * 3] * 3] * 20, [[[1.005] * 3] * 3] * 20)
    assert found.low is not None
    assert found.low > 1
    assert found.verdict == "no difference"


def test_single_samples_give_no_verdict() -> None:
    found = stats.ratio_interval([[[1.0]]], [[[2.0]]])
    assert (found.ratio, found.low, found.high, found.verdict) == (pytest.approx(2.0), None, None, "unknown")
    assert found.unseen == "the noise: one sample in one process; raise --steps"


def test_identical_samples_give_an_interval() -> None:
    found = stats.ratio_interval([[[1.0] * 10]], [[[1.1] * 10]])
    assert found.verdict == "slower"


@pytest.mark.parametrize("bad", [[[[]]], [[[0.0, 1.0, 1.0]]], [[[-1.0, -1.0, 1.0]]]])
def test_ratio_of_invalid_durations_is_refused(bad: list[list[list[float]]]) -> None:
    with pytest.raises(ValueError, match="; compare only durations above 0"):
        stats.ratio_interval(bad, [[[1.0, 1.0, 1.0]]])


def test_outliers_are_named_by_index() -> None:
    assert stats.outliers([1.00, 1.01, 0.99, 7.6, 1.0, 1.02]) == [3]
    assert stats.outliers([1.0, 1.0, 1.0, 1.0, 1.0001]) == [], "equal samples have no outliers"
    assert stats.outliers([1.0]) == []


@given(DURATIONS, st.floats(1e-3, 1e3))
def test_outliers_do_not_depend_on_the_unit(samples: list[float], unit: float) -> None:
    assert len(stats.outliers([s * unit for s in samples])) == pytest.approx(len(stats.outliers(samples)), abs=1)
    assert len(stats.outliers(samples)) <= len(samples) / 2


def test_drift_separates_a_trend_from_noise() -> None:
    rng = random.Random(5)
    steady = [1 + rng.gauss(0, 0.01) for _ in range(40)]
    rising = [s * (1 + 0.002 * i) for i, s in enumerate(steady)]
    assert stats.drift(steady[:7]) is None
    quiet, trend = stats.drift(steady), stats.drift(rising)
    assert quiet is not None
    assert trend is not None
    assert quiet.p_value > 0.05
    assert trend.p_value < 1e-6
    assert trend.change == pytest.approx(0.04, abs=0.015)


@given(st.lists(st.integers(0, 9), min_size=8, max_size=60))
def test_drift_matches_kendalls_score(samples: list[int]) -> None:
    """Compare with the definition: Kendall's score over all pairs, where ties count 0."""
    n = len(samples)
    score = sum((b > a) - (b < a) for a, b in itertools.combinations(samples, 2))
    z = max(abs(score) - 1, 0) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    found = stats.drift([float(s + 1) for s in samples])
    assert found is not None
    assert found.p_value == pytest.approx(2 * (1 - statistics.NormalDist().cdf(z)), abs=1e-12)


def test_hundred_thousand_samples_are_judged_quickly() -> None:
    """Use too many samples for an algorithm over their 5,000,000,000 pairs."""
    rng = random.Random(7)
    many = [1 + rng.gauss(0, 0.005) for _ in range(100_000)]
    assert stats.unstable(many) == []
    assert stats.unstable([s * (1 + i / 1e6) for i, s in enumerate(many)]) == [
        "the second half of the steps differs from the first by +4.9%"
    ]
    assert stats.median_interval(many) == pytest.approx((1.0, 1.0), abs=1e-4)


@given(st.integers(1, 400), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_median_interval_matches_the_binomial_distribution(n: int, confidence: float) -> None:
    """Compare with the highest rank that the median is below with a probability of at most (1 - confidence) / 2."""
    ranks = [r for r in range(1, n // 2 + 1) if sum(math.comb(n, k) for k in range(r)) <= (1 - confidence) / 2 * 2**n]
    expected = (float(ranks[-1]), float(n + 1 - ranks[-1])) if ranks else None
    assert stats.median_interval([float(i) for i in range(1, n + 1)], confidence) == expected


def test_unstable_gives_the_reason() -> None:
    rng = random.Random(6)
    steady = [1 + rng.gauss(0, 0.005) for _ in range(40)]
    assert stats.unstable(steady) == []
    assert stats.unstable([s * (1 + 0.002 * i) for i, s in enumerate(steady)]) == [
        "the second half of the steps differs from the first by +3.8%"
    ]
    (reason,) = stats.unstable([s * (1 + 0.3 * (i % 2)) for i, s in enumerate(steady)])
    assert reason.startswith("steps vary by 27%")
    (reason,) = stats.unstable([1.0, 1.0, 1.0, 21.0, 21.0] * 8)
    assert reason == "steps vary by 2,000%"


def test_one_slow_round_in_five_does_not_hide_a_difference() -> None:
    """A whole round is sometimes disturbed: on one H200 by 13% in one round of fifty."""
    quiet, slow = [[1.0], [1.001], [0.999], [1.002], [1.13]], [[1.05], [1.051], [1.049], [1.18], [1.052]]
    found = stats.ratio_interval([quiet], [slow])
    assert found.verdict == "slower"
    assert found.ratio == pytest.approx(1.05, abs=0.005)
    low, high, _ = stats.interval(quiet)
    assert low is not None
    assert high is not None
    assert high / low < 1.02


@given(st.floats(1e-7, 1e3), st.integers(2, 20))
def test_equal_samples_have_no_spread(sample: float, n: int) -> None:
    found = stats.summary([sample] * n)
    assert found.std == pytest.approx(0, abs=1e-15 * sample)
    assert (found.p10, found.median, found.p90) == (sample, sample, sample)


def test_importing_the_module_does_not_import_numpy() -> None:
    """Importing numpy takes longer than a command may take to print its help."""
    code = "import sys, cs_systems.core.statistics; print({'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("between", [0.01, 0.1])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_other_programs_show_how_much_processes_vary(processes: int, between: float) -> None:
    """They keep false differences rare where one process a side hides the variance, and intervals narrow with few."""
    rng, others_seen, alone = random.Random(5), list[stats.Comparison](), list[stats.Comparison]()
    for _ in range(150):
        others = [[process(rng, scale, between) for _ in range(3)] for scale in (1, 2, 4)]
        a, b = ([process(rng, 1.0, between) for _ in range(processes)] for _ in "ab")
        others_seen.append(stats.ratio_interval(a, b, others=others))
        alone.append(stats.ratio_interval(a, b))
    assert [found.verdict for found in others_seen].count("no difference") >= 0.92 * 150
    assert others_seen[0].unseen is None
    slow = [process(rng, 1.0, 0.01) for _ in range(processes)], [process(rng, 1.5, 0.01) for _ in range(processes)]
    quiet = [[process(rng, scale, 0.01) for _ in range(3)] for scale in (1, 2, 4)]
    assert stats.ratio_interval(*slow, others=quiet).verdict == "slower"
    if processes == 2:
        width, width_alone = (
            sorted(math.log(one.high / one.low) for one in found if one.low and one.high)[75]
            for found in (others_seen, alone)
        )
        assert width < 0.95 * width_alone


def test_restless_rounds_hide_nothing_once_processes_show_how_they_vary() -> None:
    """On a disturbed H200, rounds varied by 2.5% and the medians of processes by 1.6%: profiles/verdicts."""
    restless = (0.94, 0.97, 1.0, 1.03, 1.06)

    def side(*scales: float) -> list[list[list[float]]]:
        return [[[scale * each] for each in restless] for scale in scales]

    a, b = side(1.0, 1.01, 0.99), side(1.08, 1.07, 1.09)
    assert stats.ratio_interval(a, b).verdict == "slower"
    assert stats.ratio_interval(a[:1], b[:1]).verdict == "no difference"


@pytest.mark.parametrize(("few", "many", "most"), [(2, 8, 0.17), (3, 5, 0.12), (3, 3, 0.12)])
def test_side_that_varies_more_with_no_more_processes_has_its_own_variance(few: int, many: int, most: float) -> None:
    rng, found = random.Random(7), list[str]()
    for _ in range(400):
        a, b = ([process(rng, 1.0, sd) for _ in range(n)] for n, sd in ((few, 0.05), (many, 0.005)))
        found.append(stats.ratio_interval(a, b).verdict)
    assert found.count("no difference") >= (1 - most) * 400


@pytest.mark.parametrize("of_others", [0.005, 0.05])
def test_other_programs_that_vary_less_do_not_narrow_the_interval(of_others: float) -> None:
    rng, found = random.Random(8), list[str]()
    for _ in range(300):
        a, b = ([process(rng, 1.0, 0.05) for _ in range(2)] for _ in "ab")
        others = [[process(rng, 1.0, of_others) for _ in range(3)] for _ in range(4)]
        found.append(stats.ratio_interval(a, b, others=others).verdict)
    assert found.count("no difference") >= 0.85 * 300


def test_a_process_that_differs_from_its_pair_leaves_an_interval() -> None:
    """Two processes a side hardly show their variance, and one that is disturbed would show a tenfold one."""
    others = [[[[1.0]], [[1.02]], [[0.99]], [[1.01]]]]
    found = stats.ratio_interval([[[1.0]], [[1.01]]], [[[1.0]], [[1.3]]], others=others)
    assert found.high is not None
    assert found.high < 2.5


def test_one_other_pair_gives_an_interval_and_wrong_durations_are_refused() -> None:
    one, other = [[[1.0, 1.01, 1.0]] * 3], [[[1.1, 1.1, 1.11]] * 3]
    found = stats.ratio_interval(one, other, others=[[[[2.0]], [[2.1]]]])
    assert found.low is not None
    assert 0 < found.low < found.ratio
    with pytest.raises(ValueError, match="; compare only durations above 0"):
        stats.ratio_interval(one, other, others=[[[[0.0]], [[1.0]]]])


def test_programs_with_one_process_show_no_variance_between_processes() -> None:
    assert stats.pooled([[[[1.0, 1.0]]], [[[2.0, 2.0]]]]).dof == 0
    shown = stats.pooled([[[[1.0]], [[1.1]]], [[[20.0]], [[22.0]], [[22.0]]]])
    assert shown.dof == 3
    assert shown.variance == pytest.approx(math.log(1.1) ** 2 * (1 / 2 + 2 / 3) / 3)


def test_ratio_of_pairs_is_not_disturbed_by_what_slows_both_of_a_pair() -> None:
    """The machine is 1.0 to 3.0 times as slow; B takes 0.9 of A's time, within 1%."""
    slow, noise = (1.0, 3.0, 1.3, 2.2, 1.1, 1.7), (0.01, -0.01, 0.004, -0.003, 0.006, -0.007)
    a, b = list(slow), [0.9 * each * math.exp(more) for each, more in zip(slow, noise, strict=True)]
    found = stats.paired_ratio([y / x for x, y in zip(a, b, strict=True)])
    assert found is not None
    assert found.ratio == pytest.approx(0.9)
    assumed = 2 * stats.BETWEEN_PROCESSES_SD**2
    joined = (5 * statistics.variance(noise) + assumed) / 6
    half = stats.student_t(0.975, 6) * math.sqrt(joined / 6)
    assert (found.low, found.high) == pytest.approx((0.9 * math.exp(-half), 0.9 * math.exp(half)))
    unpaired = stats.ratio_interval([[[x]] for x in a], [[[y]] for y in b])
    assert unpaired.high is not None
    assert found.high < 1 < unpaired.high


def test_few_pairs_take_the_variance_of_others_unless_they_vary_far_more() -> None:
    quiet = [[1.0, 1.02, 0.98], [1.5, 1.53, 1.47]]  # each about its own mean
    assert stats.paired_ratio([0.9, 0.91]) is None
    assert stats.paired_ratio([], others=quiet) is None
    assert stats.paired_ratio([0.9], others=quiet[:1]) is None, "two degrees of freedom"
    one, two = (stats.paired_ratio(each, others=quiet) for each in ([0.9], [0.9, 0.9]))
    assert one is not None
    assert two is not None
    assert one.high < 1
    assert two.high - two.low == pytest.approx((one.high - one.low) / math.sqrt(2), rel=0.15)
    wild = stats.paired_ratio([0.5, 1.5], others=quiet)
    assert wild is not None
    assert wild.high / wild.low > 100, "by its own variance, of one degree of freedom"
    few = stats.paired_ratio([0.7, 0.9, 1.2], others=quiet)
    assert few is not None
    assert few.low < 1 < few.high, "they vary far more than the others, which have more degrees of freedom"
    with pytest.raises(ConfigError, match="above 0"):
        stats.paired_ratio([0.0, 1.0], others=quiet)


@pytest.mark.parametrize(("gain", "least", "most"), [(1.0, 0.0, 0.05), (1.5, 0.9, 1.0)])
def test_pairs_on_a_drifting_machine_find_a_gain_and_invent_none(gain: float, least: float, most: float) -> None:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(300):
        drift = np.cumsum(rng.normal(0, 0.05, 24)) + rng.normal(0, 0.1, 24)
        first, second = drift[::2], drift[1::2]
        ratios = np.exp(np.where(np.arange(12) % 2, first - second, second - first)) / gain
        others = [list(np.exp(rng.normal(0, 0.14, 3))) for _ in range(3)]
        shown = stats.paired_ratio(list(ratios), 0.95, others)
        assert shown is not None
        found.append(shown.high < 1)
    assert least <= statistics.fmean(found) <= most
