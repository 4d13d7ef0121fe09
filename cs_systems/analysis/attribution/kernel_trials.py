"""Kernel trials: calls of one operator that run several kernels for the same work to find the fastest."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.operator_table import operators_of
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.readers._stalls import SYNCHRONISATION, stalls
from cs_systems.readers.forms.columns import UNKNOWN, Bools, Ints
from cs_systems.readers.forms.trace import steps_of

FEWEST = 3  # different kernels; the kernels of one product, such as with split k, are at most two
FEWEST_WAITS = 2  # the host waits for each trial before the next, so that it can read the time
OPERATOR = re.compile(r"conv|mm$|mm_|matmul|linear$|gemm")


class Trials(NamedTuple):
    """Kernel trials of a mean step.

    Attributes:
        operator: the operator with the most trials; "" where no operators were recorded.
        groups: the number of calls with trials.
        kernels: the mean number of kernels tried per call.
        time_s: the time from the first kernel of each call to its last, which is the chosen one.
    """

    operator: str
    groups: float
    kernels: float
    time_s: float


def kernel_trials(profile: Profile) -> Trials | None:
    """Return the trials of products and convolutions in a mean step; None without any."""
    trace, steps, kernels = profile.trace, len(profile.steps), profile.trace.kernels
    which = np.flatnonzero(steps_of(kernels.launched_s, profile.steps)[1] & ~np.isnan(kernels.launch_start_s))
    which = which[np.argsort(kernels.launch_start_s[which], kind="stable")]
    if not len(which):
        return None
    waits_s = np.sort(trace.calls.where(lambda name: stalls(name) == SYNCHRONISATION).start_s)
    segment = np.searchsorted(waits_s, kernels.launch_start_s[which])  # number of waits before each launch
    multiplies = kernels.function.codes_where(lambda one: family(one.name) == "matmul")[which]
    ops = operators_of(trace)
    if ops is None:
        group = _runs(segment, multiplies, kernels.function.codes[which])
    else:
        group = ops.at(kernels.thread[which], kernels.launch_start_s[which])
        named = ops.signature.codes_where(lambda one: OPERATOR.search(one.name))
        group = np.where(multiplies & named[group], group, UNKNOWN)
    different, time_s, found = 0, 0.0, list[int]()
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.unique(group[group != UNKNOWN]))
    for begin, end in pairwise([*first.tolist(), len(order)]):
        mine = order[begin:end]
        names = {kernels.function.values[code].name for code in kernels.function.codes[which[mine]].tolist()}
        if len(names) >= FEWEST and segment[mine[-1]] - segment[mine[0]] >= FEWEST_WAITS:
            different += len(names)
            time_s += float(kernels.start_s[which[mine[-1]]] - kernels.start_s[which[mine[0]]])
            found.append(int(group[mine[0]]))
    if not found:
        return None
    operators = Counter(ops.signature[number].name for number in found) if ops is not None else Counter({"": 1})
    return Trials(operators.most_common(1)[0][0], len(found) / steps, different / len(found), time_s / steps)


def _runs(segment: Ints, multiplies: Bools, function: Ints) -> Ints:
    """Return for each kernel the number of its run of trials, or UNKNOWN; for traces without operators.

    Between two waits, a trial runs one product once or several times. Trials that follow each other form a run, also of
    different products.
    """
    codes, mine = np.unique(segment, return_inverse=True)
    low, high = np.full(len(codes), np.iinfo(np.int64).max), np.full(len(codes), -1)
    np.minimum.at(low, mine, function)
    np.maximum.at(high, mine, function)
    is_trial = (low == high) & (np.bincount(mine, ~multiplies, len(codes)) == 0)
    follows = np.zeros(len(codes), bool)
    follows[1:] = is_trial[:-1] & (np.diff(codes) == 1)
    run = np.cumsum(~follows)
    return np.where(is_trial[mine], run[mine], UNKNOWN)
