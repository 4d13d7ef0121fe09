"""Extra work of slow steps compared with usual ones, such as an evaluation in every tenth step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.host_gaps import own_names, written_names
from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.config import Phase
from cs_systems.core.range_names import COMMUNICATION, meaning
from cs_systems.readers.forms.columns import Range
from cs_systems.readers.forms.trace import Kernels, Step, steps_of

MOST_OF_IT = 0.5  # least share of a slow step's extra time that its cause must take
NEARLY_ALL = 0.8  # least share of the extra kernel time in forward passes, if they alone are the cause
PASS = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)  # their ranges do not name the extra work of a slow step
UPDATE = (Phase.OPTIMIZER, Phase.CLIP, COMMUNICATION)  # phases of a step that ends a gradient accumulation


class Beyond(NamedTuple):
    """Extra work of a slow step compared with a usual one.

    Attributes:
        name: the range or function of the user that takes most of the time; "" if none does.
        only_forward: nearly all of its kernels belong to forward passes without a backward.
        is_update: it is the update of accumulated gradients.
    """

    name: str
    only_forward: bool
    is_update: bool


def beyond(usual: Usual, apart: Apart) -> Beyond:
    """Return the extra work of slow steps compared with usual ones, by the means of both."""
    more_s = apart.each_s - apart.usual_s
    phases = _more(_phase_times(usual, apart.windows), _phase_times(usual, usual.windows))
    kernels_s = sum(phases.values())
    most = kernels_s >= MOST_OF_IT * more_s
    forward_s = phases.get(Phase.FORWARD, 0.0) + phases.get(Phase.LOSS, 0.0)
    update_s = sum(phases.get(phase, 0.0) for phase in UPDATE)
    names = _more(_named_times(usual, apart.windows), _named_times(usual, usual.windows))
    name = max(names, key=lambda each: names[each], default="")
    name = name if names.get(name, 0.0) >= MOST_OF_IT * more_s else ""
    return Beyond(
        "" if meaning(name).phase in PASS else name,
        only_forward=most and Phase.BACKWARD in phases and forward_s >= NEARLY_ALL * kernels_s,
        is_update=update_s >= MOST_OF_IT * more_s or meaning(name).phase in UPDATE,
    )


def _more(slow: dict[str, float], usually: dict[str, float]) -> dict[str, float]:
    return {name: slow.get(name, 0.0) - usually.get(name, 0.0) for name in {**slow, **usually}}


def _phase_times(usual: Usual, windows: Sequence[Step]) -> dict[str, float]:
    """Return the time of the kernels of each phase, per window."""
    kernels, places = usual.profile.trace.kernels, usual.profile.places
    which = steps_of(kernels.start_s, windows)[1]
    times = np.bincount(places.codes[which], (kernels.end_s - kernels.start_s)[which], len(places.values))
    found: dict[str, float] = defaultdict(float)
    for place, time_s in zip(places.values, times.tolist(), strict=True):
        found[place.phase] += time_s / len(windows)
    return dict(found)


def _named_times(usual: Usual, windows: Sequence[Step]) -> dict[str, float]:
    """Return the time of the user's outermost ranges and functions in each window, by name, per window.

    A range lasts until its kernels have ended, because the host may run ahead. A range around several steps is left
    out.
    """
    found: dict[str, float] = defaultdict(float)
    longest_s = max(window.end_s - window.start_s for window in windows)
    for name, begin_s, end_s in _extents(usual):
        number, inside = steps_of(np.array([(begin_s + end_s) / 2]), windows)
        if inside[0] and end_s - begin_s <= longest_s:
            found[name] += (end_s - max(begin_s, windows[int(number[0])].start_s)) / len(windows)
    return dict(found)


def _extents(usual: Usual) -> Iterator[tuple[str, float, float]]:
    """Yield (name, begin, end) of the user's ranges and functions, none inside another of the same name."""
    trace = usual.profile.trace
    launched, until = _until(trace.kernels)
    for ranges, named in ((trace.ranges, own_names), (trace.functions, written_names)):
        names = {name: own[0] for name in ranges.name.values if (own := named(trace, [name]))}
        last: dict[str, Range] = {}
        for each in ranges.named(names.__contains__):
            name = names[each.name]
            if name in last and each.start_s < last[name].end_s:
                continue
            last[name] = each
            first, beyond = np.searchsorted(launched, [each.start_s, each.end_s])
            end_s = max(each.end_s, float(until[first:beyond].max())) if first < beyond else each.end_s
            begin_s = max(each.start_s, float(until[first - 1])) if 0 < first < beyond else each.start_s
            yield name, min(begin_s, end_s), end_s


def _until(kernels: Kernels) -> tuple[np.ndarray, np.ndarray]:
    """Return (launches in order, for each the time when all kernels up to it have ended)."""
    order = np.argsort(kernels.launched_s, kind="stable")
    return kernels.launched_s[order], np.maximum.accumulate(kernels.end_s[order])
