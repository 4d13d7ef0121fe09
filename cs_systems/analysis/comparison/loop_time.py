"""Total time of a loop's recorded steps, and its division among kinds of steps, which a median hides."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median
from typing import TypedDict

from cs_systems.core.step_kinds import step_kinds
from cs_systems.core.units import counted, human
from cs_systems.record import Measurement

WARMUP, COMPILING, SAMPLED, USUAL, SLOW, FAST = "warm-up", "compiling", "sampled", "usual", "slow", "fast"
LONGER = 1.25  # times by which sampling makes steps longer, from which they are no usual ones


class LoopTimeRow(TypedDict):
    """Recorded steps of one kind: `every` is the distance between them in steps, None where it is not fixed."""

    kind: str
    steps: int
    every: int | None
    median_s: float
    total_s: float
    share: float  # share of the time of all recorded steps


def loop_time(measurement: Measurement) -> list[LoopTimeRow]:
    """Return a row for each kind of recorded steps, warm-up and compiling steps first; [] if a time is unknown."""
    samples = measurement.samples
    warm = [sample.wall_s for sample in samples if sample.warmup]
    compiling = [sample.wall_s for sample in samples if not sample.warmup and sample.compiles]
    return _rows(warm, compiling, [sample.wall_s for sample in samples if not (sample.warmup or sample.compiles)])


def whole_loop_time(
    durations_s: Sequence[float], compiling: Collection[int] = (), sampled: Collection[int] = (), longer: float = 1.0
) -> list[LoopTimeRow]:
    """Return a row for each kind of all steps of a loop, recorded or not.

    compiling, sampled: the numbers of the steps that compiled, and of the steps with a sampled stack.
    longer: how many times as long as a usual step a sampled one takes for that.
    """
    numbers = [number for number in range(len(durations_s)) if number not in compiling]
    of_sampled = {at for at, number in enumerate(numbers) if number in sampled} if longer >= LONGER else set[int]()
    others = [durations_s[number] for number in numbers]
    return _rows([], [durations_s[number] for number in sorted(compiling)], others, of_sampled, longer)


def _rows(
    warm: list[float],
    compiling: list[float],
    others: Sequence[float],
    sampled: Collection[int] = (),
    longer: float = 1.0,
) -> list[LoopTimeRow]:
    total_s = math.fsum((*warm, *compiling, *others))
    if not 0 < total_s < math.inf:
        return []
    groups: list[tuple[str, list[float], int | None]] = [(WARMUP, warm, None), (COMPILING, compiling, None)]
    kinds = step_kinds([time_s / longer if n in sampled else time_s for n, time_s in enumerate(others)])
    for kind in kinds:
        usual = kind.median_s == kinds[0].median_s
        name = USUAL if usual else SLOW if kind.median_s > kinds[0].median_s else FAST
        positions = [n for n in kind.positions if not usual or n not in sampled]
        if usual:
            groups.append((SAMPLED, [others[n] for n in kind.positions if n in sampled], None))
        groups.append((name, [others[n] for n in positions], None if usual else kind.every))
    return [_row(name, of_kind, every, total_s) for name, of_kind, every in groups if of_kind]


def _row(kind: str, durations_s: Sequence[float], every: int | None, total_s: float) -> LoopTimeRow:
    lasted_s = math.fsum(durations_s)
    return {
        "kind": kind,
        "steps": len(durations_s),
        "every": every,
        "median_s": median(durations_s),
        "total_s": lasted_s,
        "share": lasted_s / total_s,
    }


def sentence(rows: Sequence[LoopTimeRow]) -> str:
    """Return the total and its division in words; "" without rows.

    Example: `40 steps took 4.2 s: 36 steps in 0.8 s (19%, median 22 ms), 4 slow steps, every 10, in 3.4 s (81%, median
    850 ms)`.
    """
    if not rows:
        return ""
    steps, total_s = sum(row["steps"] for row in rows), math.fsum(row["total_s"] for row in rows)
    whole = f"{counted(steps, 'step')} took {human(total_s, 's')}"
    if [row["kind"] for row in rows] == [USUAL]:
        return f"{whole}, the median {human(rows[0]['median_s'], 's')}"
    return f"{whole}: {', '.join(map(_part, rows))}"


def _part(row: LoopTimeRow) -> str:
    count = counted(row["steps"], "step" if row["kind"] == USUAL else f"{row['kind']} step")
    if row["kind"] in (SLOW, FAST) and row["steps"] > 2:
        count += f", every {row['every']}," if row["every"] else ", irregular,"
    is_told = row["kind"] not in (WARMUP, COMPILING) and row["steps"] > 1
    middle = f", median {human(row['median_s'], 's')}" if is_told else ""
    return f"{count} in {human(row['total_s'], 's')} ({row['share']:.0%}{middle})"
