"""Sequential test of B against A: pairs are added until a verdict is safe, and it may be checked after each pair.

A pair is one process of A and one of B, right after each other. Its order is drawn: if both are the same program, the
draw alone decides which of the two times counts as B's. So the sign of log B − log A is a draw with a known chance for
any noise: drift, slow phases of a shared machine, heavy tails, two modes. No distribution is assumed, and no variance
is estimated, which matters at 10 pairs.

The evidence that B is slower is the wealth of a gambler who bets on these signs, with higher bets on large differences:

    E = mean over k of the product over pairs of exp(k u s) / (p exp(k u) + (1 − p) exp(−k u))

with s = ±1 the sign, p the chance of + for this pair, and u its size over the median size so far, at most MOST_SIZE. If
A and B are the same, E is a martingale that begins at 1, and the chance that it ever reaches 1/α is at most α (Ville
1939). That holds after any number of pairs, at any time of stopping. Large differences are cut off, so that one
disturbed process cannot outweigh many others.

With B's times divided by r the same evidence tests "B takes r times as long". All r that are not refuted form an
interval that is valid at all times simultaneously, a confidence sequence; both the verdict and the limits come from it.

Sources: Ville (1939), Étude critique de la notion de collectif. Vovk & Wang (2024), Efficiency of nonparametric
e-tests, for these bets on the symmetry of signs. Ramdas, Grünwald, Vovk & Shafer (2023), Game-theoretic statistics and
safe anytime-valid inference. The order is drawn by the biased coin of Efron (1971), which balances the first position:
the side that began fewer pairs begins the next one with a chance of 2/3. A sequential test by Student's t would need
fewer pairs, but also normal noise, which processes on a shared machine and programs with two speeds do not have.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cs_systems.core.statistics import MINIMUM_EFFECT
from cs_systems.core.validation import ConfigError

FALSE_ALARM = 0.01
"""Largest chance that equal programs get the verdict slower or faster; half of it for each direction."""

MISS = 0.02
"""Largest chance that the difference to find is excluded although it exists."""

BETS = (0.25, 0.8, 2.5)
"""Factors k of the bets: for a difference far below the noise, near it, and above it."""

MOST_SIZE = 3.0
"""Largest size of a pair's difference in the evidence, as a multiple of the median size so far."""

OWN_ORDER = 2 / 3
"""Chance that the next pair begins with the side that began fewer pairs so far (Efron 1971)."""

ASKED = ("slower", "faster")
_HALVINGS = 24


class Pair(NamedTuple):
    """Times of one process of each side, their order, and the chance that this order had when it was drawn."""

    a: float
    b: float
    a_first: bool
    chance: float = 0.5


class Standing(NamedTuple):
    """Result after some pairs; a `ratio` of B's time to A's above 1 means that B is slower.

    verdict: "slower" or "faster"; "no difference", if the difference to find is excluded in both directions; "not
    slower" or "not faster", if it is excluded in the only direction asked for; "undecided" before that. ratio: the
    median of all pairs' ratios and of the means of two of them (Hodges & Lehmann 1963); None without a pair. low, high:
    its interval, 99% unless the test has another chance of false alarms; None if there is no limit yet. resolution: the
    smallest slowdown that these pairs could have shown (0.03 is 3%); None if not even a large one could.
    """

    verdict: str
    ratio: float | None
    low: float | None
    high: float | None
    resolution: float | None
    pairs: int


class SequentialTest:
    """Test whether B is slower or faster than A.

    Repeat until `verdict` is not "undecided": `draw` an order, measure a pair, and `add` it.

    Args:
        find: relative difference to find or to exclude: 0.03 is 3%.
        asks: directions that must be answered before the test ends with "no difference": "slower", "faster" or both.
        false_alarm: largest chance that equal programs are called slower or faster, in both directions together.
        miss: largest chance that the difference to find is excluded although it is there.
        seed: seed of the orders; by default they differ each time.

    Raises:
        ConfigError: the difference to find is below 1% or not below 1000%.
    """

    def __init__(
        self,
        find: float = 0.03,
        *,
        asks: Sequence[str] = ASKED,
        false_alarm: float = FALSE_ALARM,
        miss: float = MISS,
        seed: int | None = None,
    ) -> None:
        if not MINIMUM_EFFECT <= find < 10:
            raise ConfigError(f"the difference to find is {find:.3%}; give at least 1% and less than 1000%")
        self.find, self.asks = find, tuple(asks)
        self.pairs: list[Pair] = []
        self._alarm, self._exclusion = math.log(2 / false_alarm), -math.log(miss)
        shift = math.log1p(find)
        self._equal, self._slower, self._faster = _Evidence(0.0), _Evidence(shift), _Evidence(-shift)
        self._random = random.Random(seed)
        # pairs that began with A minus those that began with B; the chance of the drawn order
        self._lead, self._chance = 0, 0.5

    def draw(self) -> bool:
        """Return whether A comes first in the next pair."""
        chance_of_a = 0.5 if not self._lead else OWN_ORDER if self._lead < 0 else 1 - OWN_ORDER
        self._a_first = self._random.random() < chance_of_a
        self._chance = chance_of_a if self._a_first else 1 - chance_of_a
        return self._a_first

    def add(self, a: float, b: float) -> None:
        """Add the times of the pair in the order that was drawn last.

        Raises ConfigError for a time that is not above 0.
        """
        self.add_pair(Pair(a, b, self._a_first, self._chance))
        self._lead += 1 if self._a_first else -1

    def add_pair(self, pair: Pair) -> None:
        """Add a pair with an order that was drawn elsewhere."""
        if not min(pair.a, pair.b) > 0 or math.isinf(max(pair.a, pair.b)):
            raise ConfigError(f"the times of a pair are {pair.a:g} and {pair.b:g} s; give finite times above 0")
        self.pairs.append(pair)
        for evidence in (self._equal, self._slower, self._faster):
            evidence.add(pair)

    @property
    def verdict(self) -> str:
        """Current verdict, as in `Standing`."""
        shown = {"slower": self._equal.most_above, "faster": self._equal.most_below}
        for name, evidence in shown.items():
            if evidence >= self._alarm and self._is_relevant(name):
                return name
        excluded = {"slower": self._slower.most_below, "faster": self._faster.most_above}
        out = [name for name, evidence in excluded.items() if evidence >= self._exclusion]
        if not {*self.asks} <= {*out}:
            return "undecided"
        return "no difference" if len(out) > 1 else f"not {out[0]}"

    @property
    def fewest_pairs(self) -> int:
        """Number of pairs that a verdict of slower or faster takes, however large the difference; one more or less."""
        evidence, pairs = _Evidence(0.0), 0
        while evidence.most_above < self._alarm:
            evidence.add(Pair(1.0, 2.0, a_first=True))
            pairs += 1
        return pairs

    def _is_relevant(self, direction: str) -> bool:
        """Return whether the ratio is at least 1% in this direction; clocks and temperature alone change as much."""
        far = abs(math.log(_center(self.pairs))) >= math.log1p(MINIMUM_EFFECT)
        return far and (_center(self.pairs) > 1) == (direction == "slower")

    def standing(self) -> Standing:
        """Return verdict, ratio, interval and resolution for the pairs so far."""
        if not self.pairs:
            return Standing("undecided", None, None, None, None, 0)
        center = math.log(_center(self.pairs))
        reach = 2 * max(abs(_difference(pair) - center) for pair in self.pairs) + 1e-3
        low = self._limit(center, -reach)
        high = self._limit(center, reach)
        resolution = None if low is None else max(math.expm1(center - low), MINIMUM_EFFECT)
        low, high = (None if limit is None else math.exp(limit) for limit in (low, high))
        return Standing(self.verdict, math.exp(center), low, high, resolution, len(self.pairs))

    def is_excluded(self, ratio: float) -> bool:
        """Return whether these pairs refute that B takes this many times as long as A, or more."""
        return _Evidence.of(self.pairs, math.log(ratio)).most_below >= self._exclusion

    def _limit(self, center: float, reach: float) -> float | None:
        """Return the first refuted shift from the center in this direction; None if none is refuted."""

        def is_refuted(shift: float) -> bool:
            evidence = _Evidence.of(self.pairs, shift)
            return (evidence.most_above if reach < 0 else evidence.most_below) >= self._alarm

        # Far away, all differences have about the same size and large bets are not made. There the evidence may be less
        # than at 0, which the verdict is about.
        beyond = [center + reach, *([0.0] if center * reach < 0 else [])]
        outside = next((shift for shift in beyond if is_refuted(shift)), None)
        if outside is None:
            return None
        inside = center
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_refuted(middle) else (middle, outside)
        return outside


class _Evidence:
    """Logarithm of the evidence that B's times are above, or below, A's times exp(shift), after each pair.

    `most_above` and `most_below` are the largest so far, because a refutation is final.
    """

    def __init__(self, shift: float) -> None:
        self._shift = shift
        self._sizes: list[float] = []  # sorted
        self._above, self._below = [0.0] * len(BETS), [0.0] * len(BETS)
        self.most_above = self.most_below = 0.0

    @classmethod
    def of(cls, pairs: Iterable[Pair], shift: float) -> _Evidence:
        evidence = cls(shift)
        for pair in pairs:
            evidence.add(pair)
        return evidence

    def add(self, pair: Pair) -> None:
        difference = _difference(pair) - self._shift
        if not difference:  # it has no sign to bet on
            return
        insort(self._sizes, abs(difference))
        size = min(abs(difference) / statistics.median(self._sizes), MOST_SIZE)
        for i, bet in enumerate(BETS):
            won, lost = _growth(bet * size, pair.chance)
            self._above[i] += won if difference > 0 else lost
            self._below[i] += lost if difference > 0 else won
        self.most_above = max(self.most_above, _log_mean(self._above))
        self.most_below = max(self.most_below, _log_mean(self._below))


def _growth(bet: float, chance: float) -> tuple[float, float]:
    """Return the logarithms of a bet's growth: for the sign that came, with this chance, and for the other sign."""
    win, loss = math.exp(bet), math.exp(-bet)
    return bet - math.log(chance * win + (1 - chance) * loss), -bet - math.log((1 - chance) * win + chance * loss)


def _log_mean(logs: Sequence[float]) -> float:
    most = max(logs)
    return most + math.log(sum(math.exp(log - most) for log in logs) / len(logs))


def _difference(pair: Pair) -> float:
    return math.log(pair.b) - math.log(pair.a)


def _center(pairs: Sequence[Pair]) -> float:
    """Return the ratio of B's time to A's: the median of the means of all pairs of two values, on a log scale."""
    logs = [_difference(pair) for pair in pairs]
    return math.exp(statistics.median((x + y) / 2 for i, x in enumerate(logs) for y in logs[i:]))
