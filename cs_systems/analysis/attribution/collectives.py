"""Collective calls of one rank's trace, and what the rank computed meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family, is_collective
from cs_systems.analysis.attribution.overlap import GLOO, Intervals, host_work, union
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.core.range_names import UNATTRIBUTED
from cs_systems.core.statistics import ROUNDING_S
from cs_systems.readers.forms.columns import Floats
from cs_systems.readers.forms.jobs import kind
from cs_systems.readers.forms.trace import steps_of


class Collective(NamedTuple):
    """One collective call on one rank; times are by the rank's own clock."""

    step: str | int
    name: str
    group: str
    ranks: int | None
    sequence: int | None
    size_bytes: int | None
    start_s: float
    end_s: float
    hidden_s: float
    beside_s: Mapping[str, float]  # phase and family of kernels → their time during the call
    launched_s: float = math.nan
    received: int | None = None  # elements that the rank holds after the call


def collectives(profile: Profile, names_work: bool = True) -> Iterable[Collective]:
    """Yield the collectives of the steps, in order of their start.

    names_work: also find which kernels ran during each call, by phase and family; this takes a pass over the kernels
    per name.
    """
    trace, steps = profile.trace, profile.steps
    if len(trace.kernels):
        launched, kernels = trace.kernels.launched_s, trace.kernels
        own = np.isin(kernels.device, profile.devices)
        which = np.flatnonzero(is_collective(kernels) & own & steps_of(launched, steps)[1])
        names = [function.name for function in kernels.function.take(which)]
        starts, ends, launched = kernels.start_s[which], kernels.end_s[which], launched[which]
    else:
        gloo = trace.ranges.take(trace.ranges.name.codes_where(lambda name: name.startswith(GLOO)))
        gloo = gloo.take(np.flatnonzero(steps_of(gloo.start_s, steps)[1]))
        gloo = gloo.take(np.argsort(gloo.start_s, kind="stable"))
        which, names = np.arange(len(gloo)), list(gloo.name)
        starts, ends, launched = gloo.start_s, gloo.end_s, gloo.start_s
    if not len(which):
        return
    number, _ = steps_of(launched, steps)
    called = [step.name for step in steps]
    stated = len({*called}) == len(called)
    beside = {label: _during(intervals, starts, ends) for label, intervals in _computing(profile, names_work).items()}
    hidden = beside.pop("")
    rows = zip(which.tolist(), names, number.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for n, (index, name, step, start, end) in enumerate(rows):
        message = trace.messages.get(index)
        what = kind(message.name) if message else kind(name)
        during = {label: float(times[n]) for label, times in beside.items() if times[n] > 0}
        yield Collective(
            called[step] if stated else steps[step].number,
            what,
            message.group if message else "",
            message.ranks if message else None,
            message.sequence if message else None,
            message.size_bytes if message else None,
            start,
            end,
            float(hidden[n]),
            during,
            float(launched[n]),
            message.out_elements if message else None,
        )


def computing(profile: Profile) -> Intervals:
    """Return the intervals in which the rank computed or copied."""
    return _computing(profile, names_work=False)[""]


COPIES = "copies"  # no phase of a loop has this name, as "copy" is one


def computing_by_phase(profile: Profile) -> dict[str, Intervals]:
    """Return the intervals in which the rank computed, by phase, and those in which it copied, by COPIES."""
    kernels, found = profile.trace.kernels, dict[str, Intervals]()
    if not len(kernels):
        work = host_work(profile.trace)
        for phase in work.phase.values:
            own = work.phase.codes_where(phase.__eq__)
            found[phase] = union(work.start_s[own], work.end_s[own])
        return found
    computes, places = ~is_collective(kernels), profile.places
    for phase in dict.fromkeys(place.phase for place in places.values):
        named = np.array([place.phase == phase for place in places.values], bool)
        own = computes & named[places.codes]
        found[phase] = union(kernels.start_s[own], kernels.end_s[own])
    copies = profile.trace.copies
    return {**found, COPIES: union(copies.start_s, copies.end_s)}


def _computing(profile: Profile, names_work: bool) -> dict[str, Intervals]:
    """Return the intervals in which the rank computed, by phase and kernel family; "" is the union, with copies."""
    trace, kernels = profile.trace, profile.trace.kernels
    if not len(kernels):
        work = host_work(trace)
        edges = {"": np.ones(len(work.phase), bool)}
        edges |= {phase: work.phase.codes_where(phase.__eq__) for phase in {*work.phase.values} - {UNATTRIBUTED}}
        return {label: union(work.start_s[own], work.end_s[own]) for label, own in edges.items()}
    computes = ~is_collective(kernels) & np.isin(kernels.device, profile.devices)
    copies = trace.copies.take(np.isin(trace.copies.device, profile.devices))
    starts = np.append(kernels.start_s[computes], copies.start_s)
    ends = np.append(kernels.end_s[computes], copies.end_s)
    found = {"": union(starts, ends)}
    if not names_work:
        return found
    families = [family(function.name) for function in kernels.function.values]
    phases = [place.phase for place in profile.places.values]
    pairs = np.array(kernels.function.codes) * len(phases) + np.array(profile.places.codes)
    labels: dict[str, list[int]] = defaultdict(list)
    for pair in np.unique(pairs[computes]).tolist():
        function, place = divmod(pair, len(phases))
        phase = "" if phases[place] == UNATTRIBUTED else f"{phases[place]} "
        labels[f"{phase}{families[function]}"].append(pair)
    for label, own in labels.items():
        mine = computes & np.isin(pairs, own)
        found[label] = union(kernels.start_s[mine], kernels.end_s[mine])
    return found


def _during(intervals: Intervals, start_s: Floats, end_s: Floats) -> Floats:
    """Return, for each stretch, the part of its time that the intervals cover."""
    if not len(intervals.start_s):
        return np.zeros(len(start_s))
    edges = np.stack([intervals.start_s, intervals.end_s], axis=1).ravel()
    until = np.concatenate([[0.0], np.cumsum(intervals.end_s - intervals.start_s)])
    covered = np.stack([until[:-1], until[1:]], axis=1).ravel()
    found = np.interp(end_s, edges, covered) - np.interp(start_s, edges, covered)
    return np.where(found > ROUNDING_S, np.minimum(found, end_s - start_s), 0.0)
