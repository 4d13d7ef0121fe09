"""Updates of the weights by the CPU: gradients are copied to the host, and weights back, while no kernel runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from cs_systems.analysis.attribution.gaps import Gaps
from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.config import Phase
from cs_systems.core.range_names import meaning
from cs_systems.readers.forms.columns import Bools
from cs_systems.readers.forms.trace import Copies, Step

LONG_S = 1e-3  # a shorter gap holds no update of a model
LEAST_COPIES = 0.01  # share of the step in each direction; scalars for a log or a batch of tokens take less
# largest ratio of the copied bytes, or of the copies' times in files without bytes: gradients and weights differ by
# their precision, and outputs from the next batch by more
ALIKE = 4.0
MOST_OF_IT = 0.5  # share of a gap


class OffloadRow(TypedDict):
    """Updates by the CPU in a mean step: time without a kernel, and the time of the copies to the host and back."""

    time_s: float
    to_host_s: float
    to_device_s: float


def offload(profile: Profile) -> OffloadRow | None:
    """Return the updates by the CPU in a mean step; None if there are none.

    A gap without a kernel is an update if copies to the host precede copies to the device in it, and a range of the
    optimizer covers most of it. Without such ranges, the program must train and run no optimizer on the device.
    """
    trace, device, steps = profile.trace, profile.devices[0], len(profile.steps)
    gaps, copies = _whole(profile.gaps[device], profile.steps), trace.copies.take(trace.copies.device == device)
    last_s = [step.end_s for step in profile.steps[:-1]]
    ranges = trace.ranges.take(trace.ranges.name.codes_where(lambda name: meaning(name).phase == Phase.OPTIMIZER))
    if not len(copies) or not (len(ranges) or _trains_without_optimizer(profile)):
        return None
    time_s, to_host, to_device = 0.0, np.zeros(len(copies), bool), np.zeros(len(copies), bool)
    # an update that goes on after the end of its step is not whole at the last one's
    goes_on = any(bisect_right(last_s, begin_s) < bisect_left(last_s, end_s) for begin_s, end_s in gaps)
    for begin_s, end_s in gaps:
        if end_s - begin_s <= LONG_S or (goes_on and end_s == profile.steps[-1].end_s):
            continue
        down, up = (_inside(copies, direction, begin_s, end_s) for direction in ("DtoH", "HtoD"))
        if not down.any() or not up.any() or copies.start_s[down].min() > copies.start_s[up].min():
            continue
        covered_s = np.clip(np.minimum(ranges.end_s, end_s) - np.maximum(ranges.start_s, begin_s), 0.0, None).sum()
        if len(ranges) and covered_s < MOST_OF_IT * (end_s - begin_s):
            continue
        time_s += end_s - begin_s
        to_host, to_device = to_host | down, to_device | up
    durations = copies.end_s - copies.start_s
    sizes = copies.bytes if (copies.bytes > 0).all() else durations
    down_s, up_s = (float(durations[own].sum()) for own in (to_host, to_device))
    less, more = sorted(float(sizes[own].sum()) for own in (to_host, to_device))
    wall_s = sum(step.end_s - step.start_s for step in profile.steps)
    if min(down_s, up_s) < LEAST_COPIES * wall_s or more > ALIKE * less:
        return None
    steps -= goes_on
    return {"time_s": time_s / steps, "to_host_s": down_s / steps, "to_device_s": up_s / steps}


def _whole(gaps: Gaps, steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Return the gaps as (start, end), those joined that are one, cut at the end of a step."""
    starts, ends = np.sort(gaps.start_s), np.sort(gaps.end_s)
    if not len(starts) or not steps:
        return []
    last = np.array([step.end_s for step in steps])
    following = np.array([*(step.start_s for step in steps[1:]), np.nan])
    at = np.minimum(np.searchsorted(last, ends[:-1]), len(steps) - 1)
    joined = (last[at] == ends[:-1]) & (following[at] == starts[1:])
    return [*zip(starts[np.append(True, ~joined)].tolist(), ends[np.append(~joined, True)].tolist(), strict=True)]


def _inside(copies: Copies, direction: str, begin_s: float, end_s: float) -> Bools:
    middle = (copies.start_s + copies.end_s) / 2
    return copies.name.codes_where(lambda name: direction in name) & (middle > begin_s) & (middle < end_s)


def _trains_without_optimizer(profile: Profile) -> bool:
    trains = any(place.phase == Phase.BACKWARD for _, place in profile.groups)
    return trains and not any(family(function.name) == "optimizer" for function, _ in profile.groups)
