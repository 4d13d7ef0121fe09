"""Kinds of steps in a series of durations: steps that do more work, such as every tenth, and the others.

Steps are one kind unless a group stands out: it comes at a fixed distance and takes twice as long, or a wide gap in the
durations (compared with their spread) separates it. Noise alone does not make a kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

FEWEST_AT_A_DISTANCE = 3  # least number of steps at a fixed distance that form a group
TIMES = 2.0  # smallest ratio of durations between two kinds
TIMES_ALONE = 3.0  # the same ratio for a single step
SHARE_ALONE = 0.05  # smallest share of the total time for a single step; a shorter one does not matter
CHANCE = 0.02  # largest probability that noise alone gives this order of durations
MOST_KINDS = 4
MOST_NEIGHBOURS = 5  # number of position differences from which a distance is guessed
GUESSES = 3
MOST_POWER = 11
FEW = 5  # the spread of so few durations is known only to a factor of two


@dataclass(frozen=True)
class StepKind:
    """Steps of one kind, by their positions in the series.

    every: the fixed distance between them, in steps; None if there is none.
    """

    positions: tuple[int, ...]
    median_s: float
    total_s: float
    every: int | None


def step_kinds(durations_s: Sequence[float]) -> list[StepKind]:
    """Return the kinds of steps, the most frequent first; a single kind for steps that differ only by noise."""
    if not durations_s:
        return []
    groups = [[*range(len(durations_s))]]
    if all(0 < duration < math.inf for duration in durations_s):
        groups = _split(groups[0], durations_s, MOST_KINDS)
    kinds: list[StepKind] = []
    for group in groups:
        kind = _kind(group, durations_s)
        alike = kinds and kind.every and kind.every == kinds[-1].every and kind.median_s < TIMES * kinds[-1].median_s
        if alike:  # consecutive steps, such as the last two of each five
            kind = _kind(sorted((*kinds.pop().positions, *group)), durations_s)
        kinds.append(kind)
    return sorted(kinds, key=lambda kind: (-len(kind.positions), kind.median_s))


def _kind(positions: Sequence[int], durations_s: Sequence[float]) -> StepKind:
    times = [durations_s[i] for i in positions]
    return StepKind(tuple(positions), median(times), math.fsum(times), _distance(positions))


def _split(group: list[int], durations_s: Sequence[float], most: int) -> list[list[int]]:
    """Return the group, divided into at most `most` kinds, fast before slow."""
    total_s = math.fsum(durations_s)
    slow = _at_a_distance(group, durations_s) or _behind_a_gap(group, durations_s, total_s)
    if not slow or most < 2:
        return [group]
    fast = [i for i in group if i not in slow]
    upper = _split([i for i in group if i in slow], durations_s, most - 1)
    if len(upper) > 1 and _median(upper[0], durations_s) < TIMES * _median(fast, durations_s):
        fast = sorted((*fast, *upper.pop(0)))  # every second one at the distance is no slower than others
    return [*_split(fast, durations_s, most - len(upper)), *upper]


def _median(group: Sequence[int], durations_s: Sequence[float]) -> float:
    return median(durations_s[i] for i in group)


def _at_a_distance(group: list[int], durations_s: Sequence[float]) -> set[int]:
    """Return the steps of the group that come at a fixed distance and take twice as long; empty if there are none.

    Of distances that noise matches equally seldom, it is the one with the slowest fastest step.
    """
    times = [durations_s[i] for i in group]
    n, found = len(times), list[tuple[float, float, range]]()
    quarter = sorted(times)[n // 4]
    for distance, first in _guesses(times):
        chosen = range(first, n, distance)
        inside = sorted(times[first::distance])
        if len(inside) < FEWEST_AT_A_DISTANCE or median(inside) < TIMES * quarter:  # below the median of the others
            continue
        rest = [time for place, time in enumerate(times) if place % distance != first]
        if median(inside) < TIMES * median(rest):
            continue
        above = sum(time >= inside[0] for time in rest)
        # number of distances and first steps that noise may match by chance
        ways = sum(range(2, n // FEWEST_AT_A_DISTANCE + 1))
        chance = math.log(ways) + _log_comb(len(inside) + above, above) - _log_comb(n, len(inside))
        if chance < math.log(CHANCE):
            found.append((round(chance, 9), -inside[0], chosen))
    best = min(found, key=lambda each: each[:2], default=None)
    return {group[place] for place in best[2]} if best else set()


def _guesses(times: Sequence[float]) -> set[tuple[int, int]]:
    """Return frequent distances between the slowest 4, 8, 16, … steps, each with its first step."""
    n, found = len(times), set[tuple[int, int]]()
    slowest = sorted(range(n), key=times.__getitem__, reverse=True)
    if n < 2 * FEWEST_AT_A_DISTANCE or times[slowest[0]] < TIMES * times[slowest[-1]]:
        return found
    for power in range(2, min(n.bit_length(), MOST_POWER)):
        slow = sorted(slowest[: min(2**power, n // 2)])
        apart = Counter(b - a for k, a in enumerate(slow) for b in slow[k + 1 : k + 1 + MOST_NEIGHBOURS])
        often = apart.most_common(GUESSES)
        nearest = min(distance for distance, count in apart.items() if count >= often[0][1] / 2)
        for distance in {nearest, *(distance for distance, _ in often)}:
            if 2 <= distance <= n // 2:
                ((first, _),) = Counter(place % distance for place in slow).most_common(1)
                found.add((distance, first))
    return found


def _behind_a_gap(group: list[int], durations_s: Sequence[float], total_s: float) -> set[int]:
    """Return the steps above the widest gap in the durations, if it is wide compared with their spread; else none."""
    ordered = sorted(group, key=lambda i: durations_s[i])
    logs = [math.log(durations_s[i]) for i in ordered]
    if len(logs) < 3:
        return set()
    gap, cut = max((b - a, place) for place, (a, b) in enumerate(pairwise(logs), 1))
    few, many = sorted((logs[:cut], logs[cut:]), key=len)
    tenth = len(many) // 10
    spread = (many[len(many) - 1 - tenth] - many[tenth]) * (1 + FEW / len(logs))
    if len(few) > 1:
        return {*ordered[cut:]} if gap >= max(math.log(TIMES), spread / 2) else set()
    is_large = math.exp(few[0]) >= SHARE_ALONE * total_s
    return {*ordered[cut:]} if is_large and gap >= max(math.log(TIMES_ALONE), spread) else set()


def _distance(positions: Sequence[int]) -> int | None:
    apart = {b - a for a, b in pairwise(positions)}
    return apart.pop() if len(apart) == 1 and len(positions) >= FEWEST_AT_A_DISTANCE and apart != {1} else None


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
