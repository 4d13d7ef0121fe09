"""Statistics of timings: quantiles, confidence intervals, drift, and verdicts of comparisons.

Durations are positive and their noise is multiplicative, so means, intervals and ratios are computed on logarithms.
Samples of one run are correlated, and rounds of one process share its memory layout, clocks and chosen kernels. Each
interval therefore comes from the highest level that was repeated (processes, else rounds, else samples), and names the
variance that it does not include.

numpy is imported in the functions that use it, because no command needs it to start.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from cs_systems.core.step_kinds import StepKind, step_kinds
from cs_systems.core.validation import ConfigError

Number = TypeVar("Number", int, float)
Rounds = Sequence[Sequence[float]]
"""Samples of one process by round, in order of measurement."""

CONFIDENCE = 0.95
"""Confidence level of every interval: at most one comparison of equal things in twenty is a false difference."""

FEWEST_ROUNDS = 3
"""Smallest number of medians with a usable spread; with fewer, the samples are cut into as many consecutive blocks."""

BETWEEN_PROCESSES_SD = 0.0095
"""Assumed standard deviation of log medians between processes that run the same thing.

One process per side cannot show this variance, so it is assumed; repeats correct it. With one process per side, this
value is the largest that meets two aims: equal things differ in at most 5 of 100 comparisons, and a slowdown of 5% is
found in at least 95: log(1.05) / √2 / (1.960 + 1.645). A simulation with the noise of 5 rounds gives the number of
processes per side that meets both aims: one if processes vary by up to 0.75%, 3 up to 1%, 5 up to 1.5%.
"""

RESTLESS_SD, RESTLESS = 0.025, 3.0
"""Limit for the standard deviation of rounds, and the ratio of processes' deviation to rounds' assumed above it.

Measured (profiles/verdicts): on one H200 rounds varied by 0.15% and processes by 0.18%; on the CPU of a shared host by
6.5% and 18%. Without this rule, half of that CPU's comparisons of equal things (one process per side) found a
difference.
"""

CONTRADICTION = 4.0
"""Ratio of measured to assumed variance between processes above which the assumption is ignored."""

ENOUGH_DOF = 4
"""Degrees of freedom that measure the variance between processes, with no need to assume it: 3 processes a side."""

UNEQUAL = 10.0
"""Ratio of the sides' variances above which they have none in common. Equal ones of 3 processes exceed it in 18%."""

MEDIAN_OVER_MEAN = 1.3
"""Assumed ratio of two variances: of the median of all samples, and of the trimmed mean of the rounds' medians.

If rounds differ more than the samples of one round, it is 1.2 for 5 rounds, and π/2 over 1.15 for many.
"""

MOST_DOF = 1e5
"""Degrees of freedom above which Student's t is the normal distribution with a first-order correction, within 1e-9."""

MINIMUM_EFFECT = 0.01
"""Smallest relative change that counts as a difference, because clocks and temperature alone change times as much."""

ROUNDING_S = 0.5e-9
"""Time below which a difference is rounding, because the clocks count whole ns."""

OUTLIER_SCORE = 3.5
"""Deviations from the median, in robust standard deviations (Iglewicz & Hoaglin 1993)."""

SPREAD_LIMIT = 0.10
"""Largest span of the middle 80% of the samples over the median; an idle H200 has 0.5–2%, a busy laptop 10–40%."""

RARE = 3
"""Least ratio of the number of usual steps to the number of slow steps that are not noise."""

DRIFT_LIMIT = 0.02
"""Largest change from the first half of the samples to the second that does not count as a drift."""


@dataclass(frozen=True)
class Summary:
    """Summary statistics of samples, in the unit of the samples.

    `std` is None for one sample; `low` and `high` are None for fewer than 6.
    """

    n: int
    median: float
    mean: float
    std: float | None
    p10: float
    p90: float
    min: float
    max: float
    low: float | None
    high: float | None


def summary(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one sample; `low` to `high` is the `median_interval`.

    Raises:
        ValueError: the samples are empty.
    """
    import numpy as np

    if not samples:
        raise ValueError("there is no sample to summarize; give at least one")
    ordered = sorted(samples)
    low, high = median_interval(ordered) or (None, None)
    mean = statistics.fmean(ordered)
    p10, p90 = np.quantile(ordered, (0.1, 0.9)).tolist()
    return Summary(
        n=len(ordered),
        median=statistics.median(ordered),
        mean=mean,
        std=float(np.std(ordered, ddof=1, mean=mean)) if len(ordered) > 1 else None,
        p10=p10,
        p90=p90,
        min=ordered[0],
        max=ordered[-1],
        low=low,
        high=high,
    )


def excess_s(a_s: float, b_s: float) -> float:
    """Return a − b of two times; 0 if they differ only by the rounding of clocks and sums."""
    return 0.0 if math.isclose(a_s, b_s, rel_tol=1e-12, abs_tol=ROUNDING_S) else a_s - b_s


def total(values: Iterable[Number | None]) -> Number | None:
    """Return the sum; None if one of the values is unknown."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def largest(values: Iterable[Number | None]) -> Number | None:
    """Return the largest known value; None if all are unknown."""
    return max((value for value in values if value is not None), default=None)


def quotient(above: float | None, below: float | None) -> float | None:
    """Return above / below; None if one of them is unknown, or `below` is 0."""
    return above / below if above is not None and below else None


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the q-quantile, 0 ≤ q ≤ 1, by linear interpolation (Hyndman & Fan 1996, type 7)."""
    import numpy as np

    if not samples:
        raise ValueError("there is no sample to take a quantile of; give at least one")
    return float(np.quantile(samples, q))


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Return the narrowest symmetric pair of order statistics that holds the median with `confidence`.

    The interval assumes no distribution, but independent samples: the number of samples below the median is
    binomial(n, ½). None if even minimum and maximum do not reach `confidence` (fewer than 6 samples at 95%).
    """
    n, ordered = len(samples), sorted(samples)
    # 10 standard deviations from the middle, where the rest is negligible
    rank = max(0, n // 2 - math.ceil(5 * math.sqrt(n)))
    below, chance = 0.0, math.comb(n, rank) / 2**n  # P(fewer than `rank` below the median), P(exactly `rank`)
    while rank < n // 2 and below + chance <= (1 - confidence) / 2:
        below, chance, rank = below + chance, chance * (n - rank) / (rank + 1), rank + 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


class Interval(NamedTuple):
    """Confidence interval of the median, in the samples' unit.

    `low` and `high` are None if the samples give no interval. `caveat` names the variance that it does not include.
    """

    low: float | None
    high: float | None
    caveat: str | None


def interval(rounds: Rounds, confidence: float = CONFIDENCE) -> Interval:
    """Return the confidence interval of the median over further rounds of this process.

    The interval is around the median of all samples. With 3 or more rounds, its width is Student's t on the logarithms
    of the rounds' medians, because samples of a round are correlated. With 5 or more, the shortest and the longest
    fifth of the rounds are trimmed (Tukey & McLaughlin 1963). With fewer than 3, it is the `median_interval` of all
    samples, with the caveat that it takes them as independent.
    """
    medians = [statistics.median(samples) for samples in rounds if samples]
    if len(medians) >= FEWEST_ROUNDS:
        variance, dof = _variance(_logs(medians))
        factor = math.exp(student_t((1 + confidence) / 2, dof) * math.sqrt(MEDIAN_OVER_MEAN * variance))
        center = median([rounds])
        return Interval(center / factor, center * factor, None)
    found = median_interval([s for samples in rounds for s in samples], confidence)
    low, high = found or (None, None)
    return Interval(low, high, "of fewer than 3 rounds the samples are taken as independent: measure with --rounds 3")


class Comparison(NamedTuple):
    """Comparison of durations of B with durations of A; a `ratio` b/a above 1 means that B is slower.

    `low` and `high` are None if there is no interval.

    resolution: the smallest slowdown that this comparison would have detected (0.03 is 3%). unseen: the variance that
    the samples cannot show, and how to measure it. noise: the source of the variance, as text: processes, rounds, or
    blocks of steps. a, b: the medians of all samples of each side; `ratio` is their ratio.
    """

    ratio: float
    low: float | None
    high: float | None
    verdict: str  # "faster", "slower", "no difference", or "unknown" if a side has only one sample
    resolution: float | None
    unseen: str | None
    noise: str
    a: float
    b: float


def ratio_interval(
    a_groups: Sequence[Rounds],
    b_groups: Sequence[Rounds],
    confidence: float = CONFIDENCE,
    others: Iterable[Sequence[Rounds]] = (),
) -> Comparison:
    """Return the ratio of B's duration to A's, with its interval and verdict.

    The ratio is taken between the medians of all samples, so that the interval contains it. With `ENOUGH_DOF` its width
    is Student's t with the common variance between the processes of both sides, and of `others` too if these are few.
    The assumed variance joins it as one more degree of freedom, unless it is far smaller: `BETWEEN_PROCESSES_SD`
    squared, plus the variance of a process of the noisier side, from the trimmed log medians of its rounds (Yuen 1974).

    Otherwise, or if the variances are `UNEQUAL`, it is Welch's t (1947): each side has a variance of its own, joined by
    that of `others` with half of their degrees of freedom, and more is assumed if the rounds suggest it.

    Args:
        a_groups: durations of A, by process and round.
        b_groups: durations of B, by process and round.
        confidence: level of the interval.
        others: durations of other programs on the same machine; their processes vary as A's and B's do.

    Raises:
        ConfigError: a duration is not above 0.
    """
    shown = pooled(others)
    a, b = (_estimate(groups, shown._replace(dof=shown.dof / 2)) for groups in (a_groups, b_groups))
    centers = median(a_groups), median(b_groups)
    ratio, unseen, noise = centers[1] / centers[0], None, _noise([*a_groups, *b_groups])
    common = _common(a_groups, b_groups, shown)
    if common or shown.dof or min(len(a_groups), len(b_groups)) > 1:
        noise = f"processes and {noise}"
    else:
        unseen = (
            "the variance between processes, because a run used one process; "
            f"{100 * max(a.between_sd, b.between_sd):.3g}% is assumed; measure it with --repeats 3, or record a loop "
            "three times into one folder"
        )
    if not (a.dof and b.dof):
        unseen = "the noise: one sample in one process; raise --steps"
        return Comparison(ratio, None, None, "unknown", None, unseen, noise, *centers)
    variance = a.variance + b.variance
    doubt = a.variance**2 / a.dof + b.variance**2 / b.dof
    dof = max(1.0, variance**2 / doubt) if doubt else math.inf
    if common:
        one, dof = _with_assumed(common, BETWEEN_PROCESSES_SD**2 + max(a.noise, b.noise))
        sides = ((len(a_groups), a), (len(b_groups), b))
        # a single process may vary more than the others, as its rounds suggest
        variance = sum(max(one, side.variance) if n == 1 else one * _of_median(n) for n, side in sides)
    half = student_t((1 + confidence) / 2, dof) * math.sqrt(variance)
    resolution = max(math.expm1(half), MINIMUM_EFFECT)
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    verdict = "no difference"
    if low > 1 and ratio >= 1 + MINIMUM_EFFECT:
        verdict = "slower"
    elif high < 1 and ratio <= 1 / (1 + MINIMUM_EFFECT):
        verdict = "faster"
    return Comparison(ratio, low, high, verdict, resolution, unseen, noise, *centers)


class PairedRatio(NamedTuple):
    """Ratio b/a of the durations of two programs, with its interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(
    ratios: Sequence[float], confidence: float = CONFIDENCE, others: Iterable[Sequence[float]] = ()
) -> PairedRatio | None:
    """Return the ratio of B's duration to A's by pairs of processes, each measured one right after the other.

    What slows a shared machine for longer than a process slows both of a pair, and does not change their ratio. The
    result is the geometric mean of the pairs' ratios. The width is Student's t with their common variance and that of
    `others`, each about its own mean; the assumed variance joins it as in `ratio_interval`.

    Pairs that vary far more than `others` are judged by their own variance alone.

    Args:
        ratios: b/a of each pair.
        confidence: level of the interval.
        others: ratios of pairs of other programs on the same machine.

    Returns:
        None if there is no pair, or all of them together have fewer degrees of freedom than ENOUGH_DOF.

    Raises:
        ConfigError: a ratio is not above 0.
    """
    if not ratios:
        return None
    logs = _logs(ratios)
    own, rest = _pooled_logs([logs]), _pooled_logs(map(_logs, filter(None, others)))
    found = _joined(own, rest)
    if found.dof < ENOUGH_DOF:
        return None
    if own.dof and rest.dof and own.variance > CONTRADICTION * rest.variance:
        found = own
    variance, dof = _with_assumed(found, 2 * BETWEEN_PROCESSES_SD**2)
    center = statistics.fmean(logs)
    half = student_t((1 + confidence) / 2, dof) * math.sqrt(variance / len(ratios))
    return PairedRatio(math.exp(center), math.exp(center - half), math.exp(center + half))


def _pooled_logs(series: Iterable[Sequence[float]]) -> Pooled:
    """Return the common variance of the logs in each series about its mean."""
    squares = dof = 0.0
    for logs in series:
        if len(logs) > 1:
            squares += statistics.variance(logs) * (len(logs) - 1)
            dof += len(logs) - 1
    return Pooled(squares / dof if dof else 0.0, dof)


def median(groups: Iterable[Rounds]) -> float:
    """Return the median of all samples, given by process and round."""
    return statistics.median(sample for rounds in groups for samples in rounds for sample in samples)


class Pooled(NamedTuple):
    """Variance of the log medians of processes, about the mean of their program, with its degrees of freedom."""

    variance: float
    dof: float


def pooled(programs: Iterable[Sequence[Rounds]]) -> Pooled:
    """Return the common variance between the processes of programs (analysis of variance, Fisher 1925)."""
    several = (groups for groups in programs if len(groups) > 1)
    return _pooled_logs(_logs([median([rounds]) for rounds in groups]) for groups in several)


def _common(a_groups: Sequence[Rounds], b_groups: Sequence[Rounds], others: Pooled) -> Pooled | None:
    """Return the common variance between processes; None if there is none, or if there are too few processes."""
    few, many = (pooled([groups]) for groups in sorted((a_groups, b_groups), key=len))
    own = _joined(few, many)
    least, most = sorted((few.variance, many.variance))
    if few.dof == 1 < many.dof or (few.dof > 1 and most > UNEQUAL * least):
        return None  # the side with more processes must not hide that the other varies more
    if own.dof >= ENOUGH_DOF:
        return own
    if others.dof and own.dof and own.variance > CONTRADICTION * others.variance:
        return own if few.dof else None
    found = _joined(own, others)
    return found if found.dof >= ENOUGH_DOF else None


def _joined(one: Pooled, other: Pooled) -> Pooled:
    dof = one.dof + other.dof
    return Pooled((one.dof * one.variance + other.dof * other.variance) / dof if dof else 0.0, dof)


def _with_assumed(measured: Pooled, assumed: float) -> Pooled:
    """Return a measured variance joined with the assumed one as one more degree of freedom, unless it is far larger."""
    return measured if measured.variance > CONTRADICTION * assumed else _joined(measured, Pooled(assumed, 1))


def _of_median(n: int) -> float:
    """Return the variance of the median of n normal values, relative to the variance of one value."""
    return math.pi / (2 * n + math.pi - 2)


class _Estimate(NamedTuple):
    """Variance of the log median of one side, with its degrees of freedom (0: unknown)."""

    variance: float
    dof: float
    between_sd: float  # assumed standard deviation between processes
    noise: float  # variance of a process, from its rounds


def _estimate(groups: Sequence[Rounds], others: Pooled) -> _Estimate:
    """Estimate one side; others: the variance between processes of other programs."""
    between_sd = BETWEEN_PROCESSES_SD
    within, within_dof = [], 0
    round_variances = []
    for rounds in groups:
        logs = _logs([statistics.median(block) for block in _blocks(rounds)])
        if len(logs) > 1:
            variance, of_rounds = _variance(logs)
            within.append(variance)
            within_dof += of_rounds
            round_variances.append(variance * (of_rounds + 1))
    if round_variances and (rounds_sd := math.sqrt(statistics.fmean(round_variances))) > RESTLESS_SD:
        between_sd = max(between_sd, RESTLESS * rounds_sd)
    assumed = between_sd**2 + (noise := statistics.fmean(within) if within else 0.0)
    own = pooled([groups])
    if own.dof + others.dof == 0:  # between_sd counts as known, so only the noise is uncertain (Satterthwaite 1946)
        noise_dof = within_dof * (assumed / noise) ** 2 if noise else math.inf
        return _Estimate(assumed, noise_dof if within else 0, between_sd, noise)
    if own.dof and own.variance > CONTRADICTION * max(assumed, others.variance):
        found = own
    else:
        found = _with_assumed(_joined(own, others), assumed)
    return _Estimate(_of_median(len(groups)) * found.variance, found.dof, between_sd, noise)


def _variance(values: Sequence[float]) -> tuple[float, int]:
    """Return (variance of their mean, degrees of freedom) after trimming a fifth of the values at each end.

    Takes at least two values. A disturbance of the machine lengthens a whole round, and one such round of five would
    hide a difference of 5%. The variance is winsorized: each cut value is replaced by its nearest kept one (Tukey &
    McLaughlin 1963; Yuen 1974).
    """
    import numpy as np

    ordered, cut = np.sort(values), len(values) // 5
    kept = ordered[cut : len(values) - cut]
    dof = len(kept) - 1
    variance = ordered.clip(kept[0], kept[-1]).var(ddof=1) * (len(values) - 1) / (len(kept) * dof)
    return float(variance), dof


def _noise(processes: Sequence[Rounds]) -> str:
    return "rounds" if all(map(_has_rounds, processes)) else "thirds of the steps, of fewer than 3 rounds"


def _has_rounds(rounds: Rounds) -> bool:
    return sum(map(bool, rounds)) >= FEWEST_ROUNDS


def _blocks(rounds: Rounds) -> list[Sequence[float]]:
    """Return the rounds; with too few rounds, all samples cut into consecutive blocks.

    Consecutive samples share their noise, so they stay together.
    """
    if _has_rounds(rounds):
        return [samples for samples in rounds if samples]
    samples = [s for part in rounds for s in part]
    cuts = [round(i * len(samples) / FEWEST_ROUNDS) for i in range(FEWEST_ROUNDS + 1)]
    return [samples[i:j] for i, j in itertools.pairwise(cuts) if i < j]


def _logs(durations: Sequence[float]) -> list[float]:
    if not durations or min(durations) <= 0:
        wrong = f"a duration is {min(durations):g} s" if durations else "there is no duration"
        raise ConfigError(f"{wrong}; compare only durations above 0")
    return [math.log(d) for d in durations]


@lru_cache
def student_t(p: float, dof: float) -> float:
    """Return the p-quantile of Student's t for p ≥ ½ and dof ≥ 1; infinite `dof` gives the normal distribution's.

    Above the median the distribution is concave, so that Newton's method reaches the quantile from the normal's, which
    is smaller. With t = √dof tan(angle), the density is a power of cos(angle) that Gauss's quadrature integrates.
    """
    import numpy as np

    t = statistics.NormalDist().inv_cdf(p)
    if dof > MOST_DOF:
        return t + (t**3 + t) / (4 * dof)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    scale = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
    change = math.inf
    while abs(change) > 1e-8 * t:
        angle = math.atan(t / math.sqrt(dof))
        below = 0.5 + scale * angle / 2 * float(weights @ np.cos(angle / 2 * (nodes + 1)) ** (dof - 1))
        change = (p - below) * math.sqrt(dof) / (scale * math.cos(angle) ** (dof + 1))
        t += change
    return t


def outliers(samples: Sequence[float]) -> list[int]:
    """Return the indices of samples that are far from the median, in robust standard deviations.

    The standard deviation is at least 1% of the median: on a device that repeats to the microsecond, every other sample
    would otherwise be an outlier.
    """
    center = statistics.median(samples)
    deviations = [abs(s - center) for s in samples]
    scale = max(statistics.median(deviations) / statistics.NormalDist().inv_cdf(0.75), 0.01 * abs(center))
    return [i for i, deviation in enumerate(deviations) if deviation > OUTLIER_SCORE * scale]


class Drift(NamedTuple):
    """Trend of samples over time.

    `change` is the ratio of the second half's median to the first half's, minus 1. `p_value` is the probability that
    chance gives an order at least as monotone.
    """

    change: float
    p_value: float


def drift(samples: Sequence[float]) -> Drift | None:
    """Return the trend of samples over time (Mann 1945, Kendall 1975); None for fewer than 8."""
    n = len(samples)
    if n < 8:
        return None
    score, _ = _rising_pairs(samples)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    z = max(abs(score) - 1, 0) / deviation
    change = statistics.median(samples[n - n // 2 :]) / statistics.median(samples[: n // 2]) - 1
    return Drift(change, 2 * (1 - statistics.NormalDist().cdf(z)))


def _rising_pairs(samples: Sequence[float]) -> tuple[int, list[float]]:
    """Return Kendall's score (rising minus falling pairs) and the sorted samples, in O(n log n)."""
    if len(samples) < 2:
        return 0, list(samples)
    middle = len(samples) // 2
    (earlier_score, earlier), (later_score, later) = _rising_pairs(samples[:middle]), _rising_pairs(samples[middle:])
    below_or_level = sum(bisect_left(earlier, s) + bisect_right(earlier, s) for s in later)
    score = earlier_score + later_score + below_or_level - len(earlier) * len(later)
    return score, sorted(earlier + later)  # sorting two sorted halves is a merge


def unstable(samples: Sequence[float], *, of_loop: bool = False) -> list[str]:
    """Return the reasons not to trust the median of these samples, as sentences; empty if there are none.

    Periodic slow steps, such as an evaluation in every tenth step, are left out because they do other work; in a user's
    own loop, all rare slow steps are left out.
    """
    usual, *others = step_kinds(samples)
    apart = {i for kind in others if kind.every or (of_loop and _is_rare(kind, usual)) for i in kind.positions}
    samples = [sample for i, sample in enumerate(samples) if i not in apart]
    reasons = []
    found = summary(samples)
    if (spread := (found.p90 - found.p10) / found.median) > SPREAD_LIMIT:
        reasons.append(f"steps vary by {spread:,.0%}")
    moved = drift(samples)
    if moved and abs(moved.change) > DRIFT_LIMIT and moved.p_value < 0.01:
        reasons.append(f"the second half of the steps differs from the first by {moved.change:+.1%}")
    return reasons


def _is_rare(kind: StepKind, usual: StepKind) -> bool:
    return kind.median_s > usual.median_s and RARE * len(kind.positions) <= len(usual.positions)
