"""Detection of faults in a GPU's profiling interface: launches without kernels, and kernels that last 0 s.

A launch without a kernel is not a fault if it records a CUDA graph, fails, or comes so late that it may have run after
the recording ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from cs_systems.readers._stalls import Kind, kind
from cs_systems.readers.forms.columns import Bools, Floats, Ints
from cs_systems.readers.forms.trace import Call, Calls, Kernels

_CAPTURE = re.compile(r"StreamBeginCapture|StreamEndCapture|GraphInstantiate")
_WAIT = re.compile(r"(Device|Stream|Ctx|Context)Synchronize")
US = 1e-6
COARSE_S = 3 * US  # a kernel with longer launches, on average, was not rounded down from less than 1 µs
MANY = 2  # launches without a kernel that one kernel without a launch can explain
IMPLAUSIBLE = 0.5  # share of the kernels; few programs have so many kernels below 1 µs (7% in a step of ResNet-50)


def launches_kernel(name: str) -> bool:
    """Return whether a call with this name launches one kernel, in contrast to a CUDA graph or a host function."""
    return kind(name) == Kind.LAUNCH


def lost_launches(kernels: Kernels, calls: Calls, launch: Ints, ran: Bools) -> Floats:
    """Return the starts of launches with kernels missing because of a fault, in order.

    Empty if many kernels have no launch: then the correlation ids are missing, not the kernels.

    Args:
        kernels: All kernels of the trace.
        calls: All calls, including calls inside other calls.
        launch: Index of each launch of one kernel in `calls`.
        ran: Whether the trace holds the work that it launched.
    """
    if ran.all() or not ran.any():
        return np.empty(0)
    start_s, end_s, thread = calls.start_s[launch], calls.end_s[launch], calls.thread[launch]
    waits_s = calls.start_s[calls.name.codes_where(_WAIT.search)]
    known_until = max(waits_s.max(initial=-math.inf), start_s[ran].max(initial=-math.inf))
    lost = ~ran & (start_s <= known_until)
    for begin, end in _captures([*calls.where(_CAPTURE.search)]):
        lost &= (start_s < begin) | (start_s > end)
    for number in np.unique(thread[lost]).tolist():
        of_thread = np.flatnonzero(thread == number)
        lost[of_thread] &= ~_repeated(start_s[of_thread], end_s[of_thread], lost[of_thread])
    alone = np.isnan(kernels.launch_start_s) & np.isfinite(kernels.launched_s)
    return np.asarray(np.sort(start_s[lost])) if MANY * alone.sum() < lost.sum() else np.empty(0)


def _repeated(start_s: Floats, end_s: Floats, lost: Bools) -> Bools:
    """Return for each launch of one thread whether it repeats an enclosing or an enclosed launch.

    The driver's call inside a runtime call is recorded too, and only one of the two has the kernel's correlation id.
    """
    order = np.lexsort((-end_s, start_s))
    reached = np.concatenate([[-math.inf], np.maximum.accumulate(end_s[order])[:-1]])
    repeated = np.zeros(len(order), bool)
    repeated[order] = end_s[order] <= reached
    kept = order[~lost[order]]
    following = np.append(kept, -1)[np.searchsorted(start_s[kept], start_s)]
    return np.asarray(repeated | ((following >= 0) & (end_s[following] <= end_s) & lost))


def _captures(calls: Sequence[Call]) -> list[tuple[float, float]]:
    """Return the intervals of CUDA graph captures; where no call begins one, each covers all time before its end."""
    if not any("Begin" in call.name for call in calls):
        return [(-math.inf, call.end_s) for call in calls]
    found: list[tuple[float, float]] = []
    for _, of_thread in groupby(sorted(calls, key=itemgetter(3, 1)), key=itemgetter(3)):
        begin: float | None = -math.inf
        for call in of_thread:
            if "Begin" in call.name:
                begin = call.start_s
            elif "End" in call.name and begin is not None:
                found.append((begin, call.end_s))
                begin = None
        if begin is not None and begin > -math.inf:
            found.append((begin, math.inf))
    return found


def zero_kernels(kernels: Kernels) -> Bools:
    """Return for each kernel whether its duration of 0 s is a fault of the profiler.

    Old files of Kineto hold whole µs, to which a short kernel may have been rounded.
    """
    lasted = kernels.end_s - kernels.start_s
    zero = lasted == 0
    if not zero.any() or zero.mean() >= IMPLAUSIBLE or not _are_whole_us(kernels.start_s - kernels.start_s[0]):
        return np.asarray(zero)
    functions = kernels.function.codes
    total, count = np.bincount(functions, lasted), np.bincount(functions, ~zero)
    return np.asarray(zero & (total > count * COARSE_S)[functions])


def _are_whole_us(time_s: Floats) -> bool:
    return bool((np.abs(time_s / US - np.rint(time_s / US)) < 1e-3).all())
