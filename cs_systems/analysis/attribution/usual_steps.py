"""Usual steps of a recording, which its conclusions are about; start-up, slow and periodic steps are set apart.

A step's duration is here the time from the end of the previous step's kernels to the end of its own kernels. This is
right also if the host runs ahead of the device, so that its ranges end long before the kernels run.

A recording without marked steps is divided by the range that holds its kernels, by the runs of its optimizer, or by the
repetition of its kernels; otherwise it is one stretch that begins after the start-up.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.gaps import SILENT_S, idle_during, silences
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.attribution.profile import RECORDING, Profile, restricted
from cs_systems.config import Phase
from cs_systems.core.printable import within
from cs_systems.core.range_names import general, is_operator, meaning
from cs_systems.core.step_kinds import step_kinds
from cs_systems.core.tracers import tracer
from cs_systems.core.units import human
from cs_systems.readers._stalls import SYNCHRONISATION, Kind, kind, stalls, unversioned
from cs_systems.readers.forms.columns import Range
from cs_systems.readers.forms.trace import WHOLE_GRAPH, Kernels, Step, Trace, steps_of

START_UP, PERIODIC, SLOW = "start-up", "periodic", "slow"
SLOWER = 1.5  # times the usual step: a slower first step was not warm
COVERS = 0.9  # share of the kernels' time inside the range of the repeated work
ALIKE = 0.9  # share of kernels that are equal one period later
PAUSE = 5.0  # times the median repetition; a longer stretch contains a pause
FEWEST = 3  # occurrences that show a period
LOADS = re.compile(r"ModuleLoad|LibraryLoad")  # calls that load kernels
LINKS = re.compile(rf"{LOADS.pattern}|cuLink")  # calls after a compilation at run time
FIRST_LAUNCHES = "first kernel launches"
NO_CALLS = "stretches without a CUDA call"
COMPILING = "stretches that end with loading a module, such as compilation"
LONGEST = 60  # characters of a name in a sentence
LONG_CALL_S = 5e-3  # a launch takes some µs; a longer one first loads or compiles code
# the same limit for the first launch of a kernel, and for calls of a recording that is cold throughout
FIRST_CALL_S = 1e-3
LEAST_NAMED = 0.05  # share of the recording; shorter ranges and copies before the usual work are not named
TO_DEVICE = re.compile("^HtoD(?! unified)")
START_UP_S = 5e-3  # a shorter time before the first launch does not count as start-up
COLD = 0.3  # share of the time that first uses take; above it, nothing usual is left to judge
MOST_OF_IT = 0.5  # share of the extra time of a slow step
FIRST_HALF = 0.5  # share of the kernels and of their time; if the start-up ends later, no usual stretch is left


class Apart(NamedTuple):
    """Steps that are not usual, and their extra time compared with the same number of usual steps.

    windows: each from the end of the previous step's kernels to the end of its own.
    """

    kind: str
    steps: tuple[int, ...]
    each_s: float
    usual_s: float
    every: int | None = None
    windows: tuple[Step, ...] = ()

    @property
    def beyond_s(self) -> float:
        return len(self.steps) * max(0.0, self.each_s - self.usual_s)


@dataclass(frozen=True)
class Usual:
    """Usual steps of a recording.

    Attributes:
        profile: the profile of these steps alone, its idle time between the ends of their kernels.
        step_s: the mean time from the end of one step to the end of the next.
        name: which they are, such as "steps 1–14 of 15"; "" for all.
        apart: the other steps.
        total_s: the time of all steps, or of the whole recording.
        start_up: the causes of the start-up with their times, the longest first, in words.
        is_cold: first uses go on until the end, so that no step is usual.
        is_once: no work repeats, so it is unknown whether the program usually runs like this.
        is_named: the program marks this work by ranges.
        is_rest: it is the rest of such a range after its start-up.
        windows: the usual steps, each from the end of the previous step's kernels to the end of its own.
    """

    profile: Profile
    step_s: float
    name: str = ""
    apart: tuple[Apart, ...] = ()
    total_s: float = 0.0
    start_up: tuple[str, ...] = ()
    start_up_s: float = 0.0
    is_cold: bool = False
    is_once: bool = False
    is_named: bool = True
    is_rest: bool = False
    windows: tuple[Step, ...] = ()


def usual_steps(profile: Profile) -> Usual:
    """Return the usual steps of a profile, as far as its recording distinguishes them."""
    if len(profile.devices) > 1:  # the limits of a step are judged on the busiest device
        profile = restricted(profile, profile.steps, device=busiest(profile))
    if [step.name for step in profile.steps] != [RECORDING]:
        return _of_steps(profile)
    trace, whole = profile.trace, profile.steps[0]
    if whole.takes_earlier and tracer(trace.profiler).starts_program:
        whole = _of_process(trace, whole)
    steps, name, is_named = _found(profile)
    if len(steps) > 1:
        found = _of_steps(_restricted(profile, steps), name)
        began_s = found.profile.steps[0].start_s
    else:
        around = steps[0] if steps else whole
        window, is_cold = _warm(trace, around)
        is_rest = window.start_s > around.start_s + START_UP_S
        if is_rest:
            name = f"{name or 'the time'} after the start-up"
        found = Usual(
            _restricted(profile, [window]),
            window.end_s - window.start_s,
            name,
            is_cold=is_cold,
            is_once=True,
            is_rest=is_rest,
        )
        began_s = window.start_s
    total_s = whole.end_s - whole.start_s
    last_s = max(window.end_s for window in found.profile.steps)
    ranges = [] if found.is_cold else ranges_before(trace, began_s, LEAST_NAMED * total_s)
    calls = long_calls(trace, whole.start_s, began_s, FIRST_CALL_S)
    if (silent_s := _silent_s(trace, whole.start_s, began_s, ranges)) >= LEAST_NAMED * total_s:
        calls[NO_CALLS] = silent_s
    first_uses = _first_uses(trace, began_s, last_s) if found.is_cold else {}
    calls = {name: calls.get(name, 0.0) + first_uses.get(name, 0.0) for name in {**calls, **first_uses}}
    causes = _times(ranges) | dict(sorted(calls.items(), key=lambda item: -item[1]))
    start_up_s = max(0.0, began_s - whole.start_s)
    if not tracer(trace.profiler).starts_program:  # it may begin in a warm program, with other work than the usual
        start_up_s = float(idle_during(trace.kernels, np.array([began_s - start_up_s]), np.array([began_s]))[0])
    elif found.is_once and (copied_s := _copied_s(trace, began_s)) >= LEAST_NAMED * total_s:
        start_up_s = max(0.0, start_up_s - copied_s)  # the input of the only pass, which a warm process copies too
    return replace(
        found,
        total_s=total_s,
        start_up=_in_words(causes),
        start_up_s=start_up_s + math.fsum(first_uses.values()),
        is_named=is_named,
    )


def _copied_s(trace: Trace, until_s: float) -> float:
    """Return the time in which copies to the device ran and no kernel, up to a time."""
    copies = trace.copies.take(trace.copies.name.codes_where(TO_DEVICE.search) & (trace.copies.start_s < until_s))
    busy = union(copies.start_s, np.minimum(copies.end_s, until_s))
    return float(idle_during(trace.kernels, *busy).sum())


def _restricted(profile: Profile, steps: Sequence[Step], windows: Sequence[Step] = ()) -> Profile:
    """Return the profile of these steps on the devices of the profile."""
    (device, *others) = profile.devices
    return restricted(profile, steps, windows, None if others else device)


def _of_process(trace: Trace, whole: Step) -> Step:
    """Return the step, extended to all calls and copies: before the first launch, and after the last kernel."""
    calls, copies = trace.calls, trace.copies
    ends = max(whole.end_s, calls.end_s.max(initial=-math.inf), copies.end_s.max(initial=-math.inf))
    return whole._replace(start_s=min(whole.start_s, calls.start_s.min(initial=math.inf)), end_s=ends)


def busiest(profile: Profile) -> int:
    """Return the device with the most kernel time."""
    times: dict[int, float] = defaultdict(float)
    for (_, device), kernels in profile.by_step.items():
        times[device] += kernels.time_s
    return max(times, key=lambda device: times[device])


def paced(profile: Profile) -> list[Step]:
    """Return each step from the end of the previous step's kernels to the end of its own.

    The first step, and a step with a range that begins long after the previous one's end, begin with their ranges.
    """
    ends: dict[int, float] = {}
    for (number, _), kernels in profile.by_step.items():
        ends[number] = max(ends.get(number, -math.inf), kernels.last_end_s)
    last_s, until_s, windows = -math.inf, -math.inf, list[Step]()
    for number, step in enumerate(profile.steps):
        end_s = max(ends.get(number, step.end_s), last_s)
        # where one range begins as another ends, the time between their kernels is part of a step
        follows = step.start_s <= until_s or step.start_s - last_s < step.end_s - step.start_s
        until_s = step.end_s
        begin_s = last_s if follows or step.start_s >= end_s else step.start_s
        windows.append(step._replace(start_s=begin_s, end_s=end_s))
        last_s = end_s
    return windows


def _of_steps(profile: Profile, name: str = "") -> Usual:
    """Set apart slow first steps, and steps of a slower kind."""
    windows, count = paced(profile), len(profile.steps)
    lasted = [window.end_s - window.start_s for window in windows]
    total_s = math.fsum(lasted)
    walls_s = math.fsum(step.end_s - step.start_s for step in profile.steps)
    if count < 2 or not all(0 < one < math.inf for one in lasted):
        (first, *_), last = profile.steps, profile.steps[-1]
        causes = long_calls(profile.trace, first.start_s, last.end_s) if count < 2 else {}
        lost_s, step_s = math.fsum(causes.values()), max(total_s, walls_s) / count
        if lost_s > COLD * step_s:
            causes = _first_uses(profile.trace, first.start_s, last.end_s)
            lost_s = math.fsum(causes.values())
        return Usual(
            profile,
            step_s,
            name,
            total_s=total_s,
            start_up=_in_words(causes),
            start_up_s=lost_s,
            is_cold=lost_s > COLD * step_s,
            is_once=count < 2,
        )
    usual_s = median(lasted[count // 2 :])
    cold = 0
    while cold < count // 2 and lasted[cold] > SLOWER * usual_s:
        cold += 1
    kinds = step_kinds(lasted[cold:])
    usual = [cold + position for position in kinds[0].positions]
    usual_s = median(lasted[number] for number in usual)
    numbers = [step.number for step in profile.steps]
    apart = []
    if cold:
        of_first = tuple(windows[:cold])
        apart.append(Apart(START_UP, tuple(numbers[:cold]), math.fsum(lasted[:cold]) / cold, usual_s, windows=of_first))
    for other in kinds[1:]:
        if other.median_s > usual_s:
            positions = [cold + position for position in other.positions]
            which, of_which = tuple(numbers[at] for at in positions), tuple(windows[at] for at in positions)
            one = Apart(PERIODIC, which, other.total_s / len(which), usual_s, other.every, of_which)
            apart.append(one if other.every else one._replace(kind=START_UP if _loads(profile.trace, one) else SLOW))
    chosen, own = [profile.steps[number] for number in usual], tuple(windows[number] for number in usual)
    if len(chosen) == count:
        return Usual(profile, max(total_s, walls_s) / count, name, total_s=total_s, windows=own)
    start_ups = [one for one in apart if one.kind == START_UP]
    causes = long_calls(profile.trace, profile.steps[0].start_s, profile.steps[cold].start_s) if cold else {}
    for window in (window for one in start_ups[bool(cold) :] for window in one.windows):
        for cause, time_s in long_calls(profile.trace, window.start_s, window.end_s).items():
            causes[cause] = causes.get(cause, 0.0) + time_s
    return Usual(
        _restricted(profile, chosen, own),
        math.fsum(lasted[number] for number in usual) / len(usual),
        _named(chosen, count, name),
        tuple(apart),
        total_s,
        start_up=_in_words(causes),
        start_up_s=math.fsum(one.beyond_s for one in start_ups),
        windows=own,
    )


def _loads(trace: Trace, one: Apart) -> bool:
    """Return whether first uses, which load code, take most of the extra time of these steps."""
    lost_s = 0.0
    for window in one.windows:
        calls = long_calls(trace, window.start_s, window.end_s)
        lost_s += sum(time_s for name, time_s in calls.items() if name == FIRST_LAUNCHES or LOADS.search(name))
    return lost_s > MOST_OF_IT * one.beyond_s


def _named(steps: Sequence[Step], count: int, name: str) -> str:
    """Return the steps by number: "steps 1–14 of 15"; only their count if the numbers are not consecutive."""
    numbers = [step.number for step in steps]
    what = name or "steps"
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return (
            f"{what} {numbers[0]}–{numbers[-1]} of {count}" if len(numbers) > 1 else f"{what} {numbers[0]} of {count}"
        )
    return f"{len(numbers)} usual of {count} {what}"


def _found(profile: Profile) -> tuple[list[Step], str, bool]:
    """Return (steps, their name, whether ranges mark them) for a recording without marked steps.

    No steps if none are found.
    """
    finders = ((_by_range, True), (_by_optimizer, True), (_by_repetition, False), (_by_rhythm, False))
    for find, is_named in finders:
        steps, name = find(profile.trace)
        if steps:
            return [step._replace(number=number) for number, step in enumerate(steps)], name, is_named
    return [], "", False


def _by_range(trace: Trace) -> tuple[list[Step], str]:
    """Return the occurrences of the user's range that contains the kernels: the most frequent, else the shortest."""
    by_name: dict[str, list[Range]] = defaultdict(list)
    whole_s = float((trace.kernels.end_s - trace.kernels.start_s).sum())
    for each in trace.ranges.named(lambda name: not is_operator(name) and not trace.is_module(name)):
        outer = by_name[general(each.name)]
        if not outer or each.start_s >= outer[-1].end_s:
            outer.append(each)
    best: tuple[tuple[bool, float], list[Step], str] | None = None
    for name, found in by_name.items():
        steps = [Step(name, one.start_s, one.end_s) for one in found if one.end_s > one.start_s]
        if not steps or len(steps) > len(trace.kernels):
            continue
        inside = steps_of(trace.kernels.launched_s, steps)[1]
        if float((trace.kernels.end_s - trace.kernels.start_s)[inside].sum()) < COVERS * whole_s:
            continue
        key = (len(steps) >= FEWEST, -sum(step.end_s - step.start_s for step in steps))
        if best is None or key > best[0]:
            best = key, steps, f"range{'s' * (len(steps) > 1)} {within(name, LONGEST)!r}"
    return (best[1], best[2]) if best else ([], "")


def _by_optimizer(trace: Trace) -> tuple[list[Step], str]:
    runs = trace.ranges.named(lambda name: meaning(name).phase == Phase.OPTIMIZER)
    ends = [run.end_s for number, run in enumerate(runs) if not number or run.start_s >= runs[number - 1].end_s]
    return [Step("step", begin, end) for begin, end in pairwise(ends)], "steps between runs of the optimizer"


def _by_repetition(trace: Trace) -> tuple[list[Step], str]:
    """Return the stretches after which the kernel sequence repeats.

    Each begins with a kernel that runs once per stretch.
    """
    kernels = trace.kernels
    order = np.argsort(kernels.launched_s, kind="stable")
    names: dict[str, int] = {}
    codes = np.array([names.setdefault(function.name, len(names)) for function in kernels.function.values], np.int64)
    sequence = codes[kernels.function.codes[order]]
    launched = kernels.launched_s[order]
    counts = np.bincount(sequence)
    runs_first = np.full(len(counts), len(sequence))
    np.minimum.at(runs_first, sequence, np.arange(len(sequence)))
    for code in np.lexsort((runs_first, counts)).tolist():  # the rarest, and of several the one that runs first
        if counts[code] < FEWEST:
            continue
        at = np.flatnonzero(sequence == code)
        period = int(np.median(np.diff(at)))
        regular = np.diff(at) == period
        if period < 2 or regular.mean() < ALIKE:
            continue
        first, last = int(at[:-1][regular][0]), int(at[1:][regular][-1])
        whole = last + period <= len(sequence) and (sequence[last : last + period] == sequence[first : first + period])
        end = last + period if np.mean(whole) >= ALIKE else last
        if end - first < COVERS * len(sequence) or not np.isfinite(launched[first:end]).all():
            continue
        if (sequence[first : end - period] == sequence[first + period : end]).mean() < ALIKE:
            continue
        begins = [*launched[at[(at >= first) & (at < end)]].tolist()]
        ends = [*begins[1:], float(kernels.end_s[order[first:end]].max())]
        ends = _without_pauses(kernels, begins, ends)
        if len(begins) > 1 and all(b > a for a, b in zip(begins, ends, strict=True)):
            steps = [Step("repetition", a, b) for a, b in zip(begins, ends, strict=True)]
            return steps, f"repetitions of {period} kernels"
    return [], ""


def _without_pauses(kernels: Kernels, begins: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Return the ends of repetitions, each before a pause between two runs of the program, which belongs to no step."""
    lasted = np.subtract(ends, begins)
    long = np.flatnonzero(lasted > PAUSE * np.median(lasted)).tolist()
    shorter = [*ends]
    for number in long if len(long) < FEWEST else []:  # three or more such stretches are steps that do something else
        own = (kernels.launched_s >= begins[number]) & (kernels.launched_s < ends[number])
        shorter[number] = min(ends[number], float(kernels.end_s[own].max()))
    return shorter


def _by_rhythm(trace: Trace) -> tuple[list[Step], str]:
    """Return the stretches between the ends of the only kernel of a program, if they are equally long.

    Kernels that follow each other without a pause are one piece of work.
    """
    kernels = trace.kernels
    ends = np.sort(kernels.end_s)
    lasted = np.diff(ends)
    if len({one.name for one in kernels.function.values}) != 1 or len(lasted) < FEWEST:
        return [], ""
    paused = kernels.launched_s[1:] - kernels.end_s[:-1]
    alike = (lasted < SLOWER * np.median(lasted)) & (lasted > np.median(lasted) / SLOWER) & (paused > SILENT_S)
    if alike.mean() < ALIKE:
        return [], ""
    return [Step("repetition", a, b) for a, b in pairwise(ends.tolist())], "repetitions of 1 kernel"


def _warm(trace: Trace, window: Step) -> tuple[Step, bool]:
    """Return the window from the end of its start-up to the end of its kernels, and whether it is cold throughout.

    The time before its first launch belongs to no step, unless kernels already ran when the recording began. The
    start-up ends with the last launch that loads code, if most kernels follow it and most of their time.
    """
    kernels = trace.kernels
    inside = steps_of(kernels.launched_s, [window])[1]
    if not inside.any():
        return window, False
    launched_s = kernels.launched_s[inside]
    start_s = float(np.where(np.isfinite(launched_s), launched_s, kernels.start_s[inside]).min())
    end_s = float(kernels.end_s[inside].max())
    if end_s <= start_s:
        return window, False
    launching_s, lasted = kernels.launch_end_s - kernels.launch_start_s, kernels.end_s - kernels.start_s
    first = np.zeros(len(kernels), bool)
    first[np.unique(kernels.function.codes, return_index=True)[1]] = True
    long = inside & ((launching_s > LONG_CALL_S) | (first & (launching_s > FIRST_CALL_S)))
    idle_s = idle_during(kernels, kernels.launch_start_s[long], kernels.launch_end_s[long])
    long[long] = idle_s > np.where(first[long], FIRST_CALL_S, LONG_CALL_S)

    def leaves_most(loaded_s: float) -> bool:
        after = inside & (kernels.launched_s >= loaded_s)
        most_s = FIRST_HALF * lasted[inside].sum()
        return bool(after.sum() >= FIRST_HALF * inside.sum() and lasted[after].sum() >= most_s)

    very_long = long & (launching_s > LONG_CALL_S)
    if very_long.any() and not leaves_most(float(kernels.launch_end_s[very_long].max())):
        lost_s = math.fsum(long_calls(trace, start_s, end_s).values())
        return window._replace(start_s=start_s, end_s=end_s), lost_s > COLD * (end_s - start_s)
    made = compiling(trace, start_s, end_s)
    if math.fsum(end - start for start, end in made) > COLD * (end_s - start_s) and not leaves_most(made[-1][1]):
        return window._replace(start_s=start_s, end_s=end_s), True
    loaded = next(filter(leaves_most, np.sort(kernels.launch_end_s[long])[::-1].tolist()), None)
    if loaded is None:
        return window._replace(start_s=start_s, end_s=end_s), False
    return Step(window.name, loaded, end_s), False


def _first_uses(trace: Trace, from_s: float, to_s: float) -> dict[str, float]:
    """Return the time of long calls in a recording that is cold throughout, and of silence up to the last of them."""
    calls = long_calls(trace, from_s, to_s, FIRST_CALL_S)
    own = trace.calls.where(_is_of_host)
    long = (own.start_s >= from_s) & (own.start_s < to_s) & (own.end_s - own.start_s > FIRST_CALL_S)
    until_s = float(own.end_s[long].max(initial=from_s))
    made_s = math.fsum(end - start for start, end in compiling(trace, from_s, to_s))
    before_s = math.fsum(end - start for start, end in compiling(trace, from_s, until_s))
    if (silent_s := math.fsum(end - start for start, end in silences(trace, from_s, until_s)) - before_s) > SILENT_S:
        calls[NO_CALLS] = silent_s
    if made_s:
        calls[COMPILING] = made_s
    return dict(sorted(calls.items(), key=lambda item: -item[1]))


def compiling(trace: Trace, from_s: float, to_s: float) -> list[tuple[float, float]]:
    """Return the stretches without a CUDA call before a call that links or loads a module: it was compiled in them."""
    loads = trace.calls.where(LINKS.search)
    stretches = silences(trace, from_s, to_s)
    following = np.append(np.sort(loads.start_s), np.inf)[
        np.searchsorted(np.sort(loads.start_s), [b for _, b in stretches])
    ]
    return [one for one, load_s in zip(stretches, following.tolist(), strict=True) if load_s - one[1] < SILENT_S]


def long_calls(trace: Trace, from_s: float, to_s: float, least_s: float = LONG_CALL_S) -> dict[str, float]:
    """Return the time of calls that load code or keep an idle device waiting for long, the longest first.

    Copies, waits for the device, and launches that wait for room in the queue are left out: the device works meanwhile.
    """
    calls = trace.calls.take((trace.calls.start_s >= from_s) & (trace.calls.start_s < to_s))
    loads = calls.name.codes_where(LOADS.search)
    long = calls.end_s - calls.start_s > least_s
    calls = calls.take(long | loads).where(_is_of_host)
    idle_s = idle_during(trace.kernels, calls.start_s, np.minimum(calls.end_s, to_s))
    found: dict[str, float] = defaultdict(float)
    for name, time_s in zip(calls.name, idle_s.tolist(), strict=True):
        if time_s > least_s or LOADS.search(name):
            found[FIRST_LAUNCHES if kind(name) in (Kind.LAUNCH, Kind.GRAPH_LAUNCH) else unversioned(name)] += time_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _is_of_host(name: str) -> bool:
    return stalls(name) != SYNCHRONISATION and "Memcpy" not in name


def ranges_before(trace: Trace, until_s: float, least_s: float) -> list[Range]:
    """Return the user's outermost ranges that ended before a time and lasted at least so long, in order."""
    found = list[Range]()
    for each in trace.ranges.named(lambda name: not is_operator(name) and not trace.is_module(name)):
        is_outer = not found or each.start_s >= found[-1].end_s
        if is_outer and each.end_s <= until_s and each.end_s - each.start_s >= least_s:
            found.append(each)
    return found


def _times(ranges: Sequence[Range]) -> dict[str, float]:
    """Return the time of ranges by name, as text, the longest first."""
    found: dict[str, float] = defaultdict(float)
    for each in ranges:
        found[f"range {within(general(each.name), LONGEST)!r}"] += each.end_s - each.start_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _silent_s(trace: Trace, from_s: float, until_s: float, ranges: Sequence[Range]) -> float:
    """Return the time without a CUDA call between two times, outside of these ranges."""
    if until_s <= from_s:
        return 0.0
    stretches = silences(trace, from_s, until_s)
    inside = (max(0.0, min(end, one.end_s) - max(start, one.start_s)) for start, end in stretches for one in ranges)
    return math.fsum(end - start for start, end in stretches) - math.fsum(inside)


def whole_graph_share(profile: Profile) -> float:
    """Return the share of kernel time in CUDA graphs that were recorded only as a whole."""
    whole_s = sum(
        total.time_s for (function, _), total in profile.groups.items() if function.name.startswith(WHOLE_GRAPH)
    )
    return whole_s / profile.time_s if profile.time_s else 0.0


def _in_words(causes: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{human(time_s, 's')} in {name}" for name, time_s in causes.items())
