"""Host time by range, also for traces without kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Annotated, TypedDict

import numpy as np

from cs_systems.analysis.attribution.places import NOTHING_OPEN, main_timeline, phase_inside, phase_of
from cs_systems.core.range_names import UNATTRIBUTED, general
from cs_systems.core.tables import Column
from cs_systems.readers.forms.columns import Floats, Ints, Ranges, Timeline, distinct
from cs_systems.readers.forms.trace import Step, steps_of

Key = tuple[str | None, str]  # (phase, name of the range)
Stack = tuple[str, ...]  # names of open ranges, outermost first
Known = dict[tuple[Stack, Stack], tuple[str, tuple[Key, ...]]]  # (own, outer) ranges → phase and keys


class RangeRow(TypedDict):
    """Range of the host in a step, in `ranges`: wall time of the host, summed over threads."""

    phase: str | None  # None outside of all phases
    range: Annotated[str, Column(beside=55)]
    calls_per_step: Annotated[float, Column("calls", drop=8)]
    total_s: Annotated[float, Column("CPU time")]
    self_s: Annotated[float, Column("self time", drop=1)]  # without nested ranges
    share: Annotated[float, Column("of wall time", drop=9)]  # share of the steps' wall time


def range_rows(ranges: Ranges, steps: Sequence[Step]) -> list[RangeRow]:
    """Return one row for each range that began in a step, and each phase that it was open in, the longest first."""
    main, marks = main_timeline(ranges), {general(step.name) for step in steps}
    ends = np.array([step.end_s for step in steps])
    calls, total_s, self_s = Counter[Key](), Counter[Key](), Counter[Key]()
    for thread, line in ranges.timelines.items():
        outer = NOTHING_OPEN if line is main else main
        number, inside = steps_of(line.times[1:-2], steps)
        start_s, end_s = line.times[1:-2][inside], line.times[2:-1][inside]
        stretches, codes = _open(line, outer, start_s, marks)
        lasted = np.bincount(codes, np.minimum(end_s, ends[number[inside]]) - start_s)
        for keys, time_s in zip(stretches, lasted.tolist(), strict=True):
            self_s.update({keys[-1]: time_s} if keys else {})
            total_s.update(dict.fromkeys(keys, time_s))
        own = ranges.take((ranges.thread == thread) & steps_of(ranges.start_s, steps)[1])
        begins, codes = _open(line, outer, own.start_s, marks)
        for (code, name), count in Counter(zip(codes.tolist(), map(general, own.name), strict=True)).items():
            calls.update({key: count for key in begins[code] if key[1] == name})
    wall_s = sum(step.end_s - step.start_s for step in steps)
    return [
        {
            "phase": phase,
            "range": name,
            "calls_per_step": calls[phase, name] / len(steps),
            "total_s": time_s / len(steps),
            "self_s": self_s[phase, name] / len(steps),
            "share": time_s / wall_s,
        }
        for (phase, name), time_s in total_s.most_common()
        if calls[phase, name]
    ]


def _open(
    line: Timeline[str], outer: Timeline[str], time_s: Floats, marks: Set[str]
) -> tuple[list[tuple[Key, ...]], Ints]:
    """Return (open ranges, codes): each list of keys open together, outermost first, and the list's index at each time.

    A range's phase may be open on the thread `outer`. A range that marks a step has no phase, because it may
    begin in a hook of the last optimizer.
    """
    here, there = line.index(time_s), outer.index(time_s)
    first, codes = distinct(here, there)
    stacks = zip(here[first].tolist(), there[first].tolist(), strict=True)
    known: Known = {}
    return [_keys(line.stacks[own], outer.stacks[other], marks, known) for own, other in stacks], codes


def _keys(own: Stack, outer: Stack, marks: Set[str], known: Known) -> tuple[Key, ...]:
    """Return the keys of open ranges, each once, the innermost last; fill `known`, from which enclosing ranges come."""
    enclosing = len(own)
    while enclosing and (own[:enclosing], outer) not in known:
        enclosing -= 1
    phase, keys = known[own[:enclosing], outer] if enclosing else (phase_of(outer), ())
    for depth, name in enumerate(own[enclosing:], enclosing + 1):
        phase = phase_inside(phase, name)
        shared = general(name)
        key = (None if phase == UNATTRIBUTED or shared in marks else phase, shared)
        keys = (*(other for other in keys if other != key), key)
        known[own[:depth], outer] = phase, keys
    return keys
