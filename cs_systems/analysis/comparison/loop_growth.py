"""Growth of a quantity from step to step: memory that is kept, and steps that become slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import mean, median
from typing import NamedTuple

FEWEST = 10  # least number of readings for a growth
MOST = 60  # number of evenly spaced readings that are used
TAU = 0.7  # least share of rising minus falling pairs: noise and a sudden change stay below it
LEAST_MEMORY = 32e6  # bytes; the pools of an allocator grow by less than this
LEAST_TIMES = 1.3  # ratio of the last steps to the first ones
LEAST_SLOPE = 0.3  # least growth per step in the second half, as a share of the first half's; below it, the growth ends
GROUPS = 15  # number of groups of steps of which the fastest are compared
PARTS = 5  # number of parts into which the readings are divided
FEWEST_PHASES, LEAST_PHASE_S = 3, 5e-5  # phases from which, and seconds with which, they can be compared
LEAST_ALIKE = 0.15  # rise of all phases; below it, noise may hide which of them rises
ALIKE = 0.5  # least rise of each phase, as a share of the rise of all
LEAST_RISE = 0.3  # least rise between two parts, as a share of the mean rise; an allocator's pools grow with pauses


class Growth(NamedTuple):
    """Growth by step, and the quantity at the first and last reading by a line through the medians of both ends."""

    steps: int
    first: float
    last: float
    per_step: float


def memory_growth(readings: Sequence[tuple[int, float]]) -> Growth | None:
    """Return the growth of memory, given as (step, bytes); None if it does not grow steadily."""
    found = _steady(readings)
    if found is None or found.last - found.first < LEAST_MEMORY:
        return None
    levels = [median(size for _, size in part) for part in _parts(readings)]
    rises = [after - before for before, after in pairwise(levels)]
    return found if min(rises) >= LEAST_RISE * mean(rises) else None


def time_growth(durations_s: Sequence[tuple[int, float]]) -> Growth | None:
    """Return the growth of the time per step, given as (step, seconds); None if it does not grow steadily."""
    found = _steady(durations_s)
    return found if found is not None and found.last >= LEAST_TIMES * found.first else None


def fastest(durations_s: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the fastest of each few consecutive steps, given as (step, seconds): those that a busy machine spares."""
    count = max(1, len(durations_s) // GROUPS)
    groups = (durations_s[at : at + count] for at in range(0, len(durations_s) - count + 1, count))
    return [min(group, key=lambda step: step[1]) for group in groups]


def follows_inputs(sizes: Sequence[tuple[int, float]]) -> bool:
    """Return whether the inputs of the models grow, given as (step, elements), as by a schedule of lengths.

    Inputs in proportion to the number of the step are all batches so far: these grow by a fault.
    """
    found = time_growth(sizes)
    if found is None:
        return False
    (first, least), (last, most) = sizes[0], sizes[-1]
    return least * (last + 1) > LEAST_TIMES * most * (first + 1)


def varies(calls: Sequence[int], sizes: Sequence[int] = ()) -> bool:
    """Return whether steps differ in their number of calls of the models, and not by evaluations or a steady growth.

    A step with an episode of any length is such a one: what it takes says nothing about earlier steps. A quarter of
    the steps is enough where the inputs differ too, as with several updates after each rollout.
    """
    others = _others(calls)
    if others > 1 / 2:
        return time_growth([*enumerate(calls)]) is None
    return others >= 1 / 4 and _others(sizes) > 1 / 2 and time_growth([*enumerate(sizes)]) is None


def is_of_machine(phases: Mapping[str, Sequence[float]]) -> bool:
    """Return whether all phases of the steps became slower alike, as on a machine that became slower.

    phases: seconds in each step. What a loop does for all its earlier steps is in one or two of them.
    """
    thirds = {name: len(times_s) // 3 for name, times_s in phases.items() if len(times_s) >= FEWEST}
    every = [(median(phases[name][:n]), median(phases[name][-n:])) for name, n in thirds.items()]
    short = [each for each in every if each[0] < LEAST_PHASE_S]
    together = sum(early for early, _ in short), sum(late for _, late in short)
    ends = [each for each in (*every, together) if each[0] >= LEAST_PHASE_S]
    if len(ends) < FEWEST_PHASES:
        return False
    rise = sum(late for _, late in ends) / sum(early for early, _ in ends) - 1
    return rise >= LEAST_ALIKE and all(late / early - 1 >= ALIKE * rise for early, late in ends)


def _others(numbers: Sequence[int]) -> float:
    """Return the share of the steps with another number than the most usual one."""
    return 1 - max(numbers.count(number) for number in numbers) / len(numbers) if numbers else 0.0


def _steady(points: Sequence[tuple[int, float]]) -> Growth | None:
    if len(points) < FEWEST:
        return None
    distance = max(1, len(points) // MOST)
    points = points[::distance]
    pairs = [*combinations(points, 2)]
    rising = sum((b > a) - (b < a) for (_, a), (_, b) in pairs)
    if rising < TAU * len(pairs):
        return None
    slopes = [_slope(half) for half in (points[: len(points) // 2], points[len(points) // 2 :])]
    if slopes[1] < LEAST_SLOPE * slopes[0] or slopes[1] <= 0:
        return None
    count = len(points) // PARTS
    (begin, early), (end, late) = _middle(points[:count]), _middle(points[-count:])
    per_step = (late - early) / (end - begin)
    values, (first, last) = [value for _, value in points], (points[0][0], points[-1][0])
    return Growth(
        last - first,
        max(min(values), early - per_step * (begin - first)),
        min(max(values), late + per_step * (last - end)),
        per_step,
    )


def _middle(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the median step and the median quantity of some readings."""
    return median(n for n, _ in points), median(value for _, value in points)


def _parts(readings: Sequence[tuple[int, float]]) -> list[Sequence[tuple[int, float]]]:
    """Return the readings in order, divided into parts of nearly the same size."""
    ends = [round(len(readings) * number / PARTS) for number in range(PARTS + 1)]
    return [readings[begin:end] for begin, end in pairwise(ends)]


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the median slope of all pairs (Theil 1950, Sen 1968)."""
    return median((b - a) / (n - m) for (m, a), (n, b) in combinations(points, 2) if n != m)
