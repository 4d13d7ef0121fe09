"""Limits and formulas of the statistics, against values computed by hand and by published tables of Student's t."""

from __future__ import annotations

import math

import pytest

from cs_systems.core import statistics as stats

T_1, T_2, T_4, T_5 = (
    12.7062047,
    4.30265273,
    2.77644511,
    2.57058184,
)  # 0.975-quantiles of Student's t, by degrees of freedom
ASSUMED = 0.0095  # standard deviation between processes, of logarithms


def of_logs(*logs: float) -> list[list[float]]:
    """Return rounds of one sample each with these logarithms."""
    return [[math.exp(log)] for log in logs]


def test_summary_has_the_10th_and_90th_percentiles() -> None:
    found = stats.summary([float(i) for i in range(11)])
    assert (found.p10, found.p90) == (1.0, 9.0)
    assert stats.summary([1.0, 3.0]).std == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("a_s", "b_s", "expected"),
    [
        (1e-3, 1e-3 + 0.4e-9, 0.0),
        (1e-3 + 0.6e-9, 1e-3, pytest.approx(0.6e-9, rel=1e-3)),
        (1e-3, 1e-3 + 0.6e-9, pytest.approx(-0.6e-9, rel=1e-3)),
        (1e6 + 0.9e-6, 1e6, 0.0),
        (1e6 + 1.2e-6, 1e6, pytest.approx(1.2e-6, rel=1e-3)),
    ],
)
def test_excess_below_the_clocks_resolution_is_zero(a_s: float, b_s: float, expected: float) -> None:
    assert stats.excess_s(a_s, b_s) == expected


@pytest.mark.parametrize(
    ("logs", "deviation"),
    [
        ((-0.01, 0.0, 0.01), 0.01 / math.sqrt(3)),
        # Of five rounds the first and the last are cut, and count as their neighbours in the variance.
        ((-0.04, -0.01, 0.0, 0.01, 0.09), 0.01 * math.sqrt(4 / 6)),
    ],
)
def test_interval_of_rounds_is_students_t_on_logarithms(logs: tuple[float, ...], deviation: float) -> None:
    low, high, _ = stats.interval(of_logs(*logs))
    half = T_2 * math.sqrt(1.3) * deviation
    assert low == pytest.approx(math.exp(-half), rel=1e-6)
    assert high == pytest.approx(math.exp(half), rel=1e-6)


def test_interval_of_two_rounds_takes_the_samples_as_independent() -> None:
    samples = [float(i) for i in range(1, 7)]
    assert stats.interval([samples[:3], samples[3:]])[:2] == (1.0, 6.0)


def test_ratio_of_one_process_per_side_adds_the_assumed_variance_between_processes() -> None:
    noise = 0.01**2 / 3
    variance = ASSUMED**2 + noise
    dof = 2 * 2 * (variance / noise) ** 2
    half = stats.student_t(0.975, dof) * math.sqrt(2 * variance)
    side = [of_logs(-0.01, 0.0, 0.01)]
    found = stats.ratio_interval(side, side)
    assert found.resolution == pytest.approx(math.expm1(half), rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(math.exp(-half)), pytest.approx(math.exp(half)))


@pytest.mark.parametrize(("apart", "assumed"), [(0.0249, "0.95"), (0.0251, "7.53")])
def test_varying_rounds_raise_the_assumed_variance_between_processes(apart: float, assumed: str) -> None:
    for a, b in ((apart, 0.0), (0.0, apart)):
        unseen = stats.ratio_interval([of_logs(-a, 0.0, a)], [of_logs(-b, 0.0, b)]).unseen or ""
        assert f"; {assumed}% is assumed;" in unseen


def side(apart: float) -> list[list[list[float]]]:
    """Return three processes with equal rounds and logarithms that differ by `apart`."""
    return [of_logs(*[log] * 3) for log in (-apart, 0.0, apart)]


@pytest.mark.parametrize(
    ("times", "t", "share"),
    [
        (3.99, T_5, (1 + 4 * 3.99) / 5),  # the mean of the assumed and of the shown variance, which counts four times
        (4.01, T_4, 4.01),  # contradicts the assumed variance
    ],
)
def test_several_processes_measure_their_variance(times: float, t: float, share: float) -> None:
    of_median = math.pi / (4 + math.pi)
    half = t * math.sqrt(2 * of_median * share) * ASSUMED
    processes = side(math.sqrt(times) * ASSUMED)
    found = stats.ratio_interval(processes, processes)
    assert found.resolution == pytest.approx(math.expm1(half), rel=1e-6)
    assert found.unseen is None


def test_processes_of_one_sample_each_show_their_variance_too() -> None:
    apart = math.sqrt(3.0) * ASSUMED
    single = [[[math.exp(log)]] for log in (-apart, 0.0, apart)]
    expected, found = (stats.ratio_interval(of, of) for of in (side(apart), single))
    assert found.resolution == pytest.approx(expected.resolution)
    assert found.verdict == "no difference"


@pytest.mark.parametrize(("a", "b", "unseen"), [(1, 2, True), (2, 1, True), (2, 2, False)])
def test_one_process_on_either_side_does_not_show_the_variance(a: int, b: int, unseen: bool) -> None:
    process = of_logs(0.0, 0.0, 0.0)
    found = stats.ratio_interval([process] * a, [process] * b)
    assert ("a run used one process" in (found.unseen or "")) is unseen
    assert found.noise == ("rounds" if unseen else "processes and rounds")


def of_median(n: int) -> float:
    """Return the variance of the median of n normal values over that of one (an approximation)."""
    return math.pi / (2 * n + math.pi - 2)


def varying(n: int, times: float) -> list[list[list[float]]]:
    """Return processes with equal rounds, and so many times the assumed variance between them."""
    apart = math.sqrt(times * (n - 1) / 2) * ASSUMED
    return [of_logs(*[log] * 3) for log in (-apart, *[0.0] * (n - 2), apart)]


ONE = [of_logs(0.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("a", "b", "others", "variances", "dof"),
    [
        # a common variance, with the assumed one as one more degree of freedom
        (varying(3, 1.0), varying(5, 1.0), [], [of_median(3), of_median(5)], 7),
        (varying(3, 0.1), varying(3, 0.999), [], [(2 * 1.099 + 1) / 5 * of_median(3)] * 2, 5),
        (varying(3, 2.0), varying(3, 2.0), [varying(3, 4.0)], [(4 * 2.0 + 1) / 5 * of_median(3)] * 2, 5),
        (varying(2, 1.0), varying(2, 1.0), [varying(3, 1.0)], [of_median(2)] * 2, 5),
        # variances of their own: of two processes beside more, of unequal sides, and of too few
        (varying(2, 1.0), varying(5, 1.0), [], [(of_median(2), 2), (of_median(5), 5)], None),
        (
            *(varying(3, 0.1), varying(3, 1.001), []),
            *([((2 * times + 1) / 3 * of_median(3), 3) for times in (0.1, 1.001)], None),
        ),
        (varying(3, 1.0), varying(3, 11.0), [], [(of_median(3), 3), (11 * of_median(3), 2)], None),
        (ONE, ONE, [varying(3, 2.0)], [(1.5, 2)] * 2, None),
        (ONE, varying(2, 1.0), [varying(3, 1.0)], [(1.0, 2), (of_median(2), 3)], None),
    ],
)
def test_sides_have_a_common_variance_or_one_of_their_own(
    a: stats.Rounds, b: stats.Rounds, others: list[stats.Rounds], variances: list[float], dof: float | None
) -> None:
    """Variances are in units of the assumed one; with their own, the degrees of freedom are Welch's."""
    if dof is None:
        of_sides, dofs = zip(*variances, strict=True)
        dof = sum(of_sides) ** 2 / sum(each**2 / of for each, of in zip(of_sides, dofs, strict=True))
    else:
        of_sides = variances
    half = stats.student_t(0.975, dof) * math.sqrt(sum(of_sides)) * ASSUMED
    for sides in ((a, b), (b, a)):
        assert stats.ratio_interval(*sides, others=others).resolution == pytest.approx(math.expm1(half), rel=1e-6)


def test_degrees_of_freedom_are_at_least_one() -> None:
    """A single other pair, which varies far more than is assumed, has half a degree for each side."""
    half = T_1 * math.sqrt(100 * (1 + of_median(2) / 3)) * ASSUMED
    found = stats.ratio_interval(ONE, varying(2, 0.0), others=[varying(2, 100.0)])
    assert found.resolution == pytest.approx(math.expm1(half), rel=1e-6)


def test_noisier_side_s_rounds_add_to_the_assumed_variance() -> None:
    apart = math.sqrt(3) * ASSUMED  # of which the variance of the rounds' mean is the assumed one
    noisy = [of_logs(log - apart, log, log + apart) for log in (-ASSUMED, 0.0, ASSUMED)]
    half = T_5 * math.sqrt(2 * of_median(3) * (4 + 2) / 5) * ASSUMED
    for sides in ((noisy, side(ASSUMED)), (side(ASSUMED), noisy)):
        assert stats.ratio_interval(*sides).resolution == pytest.approx(math.expm1(half), rel=1e-6)


def test_single_process_of_restless_rounds_varies_more_than_the_other_side_s() -> None:
    restless, of_rounds = [of_logs(-0.03, 0.0, 0.03)], 0.03**2 / 3
    others = (5 * ASSUMED**2 + of_rounds) / 5
    half = T_5 * math.sqrt((3 * 0.03) ** 2 + of_rounds + others * of_median(5))
    found = stats.ratio_interval(restless, varying(5, 1.0))
    assert found.resolution == pytest.approx(math.expm1(half), rel=1e-6)


def test_two_samples_show_noise_and_one_shows_none() -> None:
    two = [[[math.exp(-ASSUMED), math.exp(ASSUMED)]]]
    half = stats.student_t(0.975, 8) * 2 * ASSUMED
    assert stats.ratio_interval(two, two).resolution == pytest.approx(math.expm1(half), rel=1e-6)
    for sides in ((two, [[[1.0]]]), ([[[1.0]]], two)):
        assert stats.ratio_interval(*sides).verdict == "unknown"


@pytest.mark.parametrize(("bad", "message"), [([2.0, -1.0, 1.0], "a duration is -1 s"), ([], "there is no duration")])
def test_refused_duration_is_named(bad: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.ratio_interval([[bad]], [[[1.0] * 3]])


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (1.0099, "no difference"),
        (1.01, "slower"),
        (1 / 1.0099, "no difference"),
        (1 / 1.01, "faster"),
    ],
)
def test_one_percent_is_the_smallest_difference(ratio: float, verdict: str) -> None:
    found = stats.ratio_interval([[[1.0]] * 3] * 50, [[[ratio]] * 3] * 50)
    assert found.verdict == verdict
    assert found.resolution == 0.01


def test_interval_that_holds_one_is_no_difference() -> None:
    processes = side(0.02)
    for ratio in (1.03, 1 / 1.03):
        other = [[[ratio * sample for sample in samples] for samples in rounds] for rounds in processes]
        found = stats.ratio_interval(processes, other)
        assert found.low is not None
        assert found.high is not None
        assert found.low < 1 < found.high
        assert found.verdict == "no difference"


def test_samples_of_too_few_rounds_are_cut_into_thirds_in_their_order() -> None:
    logs = (0.0, 0.01, 0.02, 0.02, 0.03, 0.04, 0.04)  # thirds of 2, 3 and 2 samples
    thirds = (0.005, 0.02, 0.04)
    two_rounds = [[math.exp(log) for log in part] for part in (logs[:4], logs[4:])]
    other = [of_logs(0.02, 0.02, 0.02)]
    found, expected = (stats.ratio_interval([a], other) for a in (two_rounds, of_logs(*thirds)))
    assert found.resolution == pytest.approx(expected.resolution, rel=1e-3)


@pytest.mark.parametrize(("last", "found"), [(1.034, []), (1.036, [9])])
def test_outlier_of_equal_samples_is_more_than_3_5_percent_off(last: float, found: list[int]) -> None:
    assert stats.outliers([1.0] * 9 + [last]) == found
    assert stats.outliers([1.0] * 9 + [2 - last]) == found


@pytest.mark.parametrize(("last", "found"), [(1.518, []), (1.52, [6])])
def test_outlier_is_more_than_3_5_robust_standard_deviations_off(last: float, found: list[int]) -> None:
    """The median deviation is 0.1, that of a normal distribution with a standard deviation of 0.14826."""
    assert stats.outliers([0.9, 0.9, 0.9, 1.0, 1.1, 1.1, last]) == found


def test_drift_compares_the_halves_without_the_middle() -> None:
    found = stats.drift([1.0] * 4 + [5.0] + [2.0] * 4)
    assert found is not None
    assert found.change == 1.0


@pytest.mark.parametrize(
    ("samples", "reasons"),
    [
        ([1.0] * 9 + [1.099, 1.2], []),
        ([10.0] * 9 + [11.0] * 2, []),  # exactly
        ([1.0] * 9 + [1.101, 1.2], ["steps vary by 10%"]),
        ([1.0] * 10 + [1.0199] * 10, []),
        ([1.0] * 10 + [1.0201] * 10, ["the second half of the steps differs from the first by +2.0%"]),
        ([1.0205] * 10 + [1.0] * 10, ["the second half of the steps differs from the first by -2.0%"]),
        ([1.0] * 6 + [1.05] * 6, []),  # by chance in 16 of 1,000 cases
        ([1.0] * 7 + [1.05] * 7, ["the second half of the steps differs from the first by +5.0%"]),  # in 9 of 1,000
    ],
)
def test_samples_are_unstable_beyond_the_limits(samples: list[float], reasons: list[str]) -> None:
    assert stats.unstable(samples) == reasons


@pytest.mark.parametrize("p", [0.6, 0.975, 0.999])
def test_student_t_quantile_is_continuous_between_its_two_formulas(p: float) -> None:
    below, above = (stats.student_t(p, stats.MOST_DOF * times) for times in (1 - 1e-9, 1 + 1e-9))
    normal = stats.student_t(p, math.inf)
    assert above == pytest.approx(below, abs=1e-8)
    assert above - normal > 1e-7


@pytest.mark.parametrize(("usual", "reasons"), [(12, []), (11, ["steps vary by 200%"])])
def test_slow_steps_of_a_loop_are_rare_if_three_times_as_many_are_usual(usual: int, reasons: list[str]) -> None:
    samples = [1.0] * usual
    for place in (2, 3, 7, 12):
        samples.insert(place, 3.0)
    assert stats.unstable(samples, of_loop=True) == reasons


def test_unknown_values_have_no_maximum_or_quotient() -> None:
    assert (stats.largest([1, None, 3]), stats.largest([None])) == (3, None)
    assert stats.quotient(1.0, 2.0) == 0.5
    assert [stats.quotient(*values) for values in ((None, 2.0), (1.0, None), (1.0, 0.0))] == [None] * 3


def test_median_interval_may_hold_exactly_the_confidence() -> None:
    assert stats.median_interval(range(1, 6), 0.9375) == (1, 5)
    assert stats.median_interval(range(1, 6), 0.938) is None


def test_median_interval_of_many_samples_is_that_of_the_normal_distribution() -> None:
    """The probability of a rank far from the middle is too small for a number of the machine."""
    assert stats.median_interval(range(1, 20_001)) == (9_861, 10_140)
