"""Kernels that a compiler could fuse: runs of kernels that are bound by memory, one after the other on a stream."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.readers.forms.trace import steps_of

FAMILIES = ("elementwise", "copy", "norm")  # bound by memory, and fused into their neighbours


class FusableRow(TypedDict):
    """Runs of at least two such kernels in a mean step: kernels, their time, and that without each run's longest."""

    fusable_per_step: float
    time_s: float
    saved_s: float


def fusable_runs(profile: Profile) -> FusableRow:
    """Return the runs, of which one kernel would stay.

    At best: neighbours that do not use each other's results are not fused. A run ends at any other kernel of its
    stream, and at the end of its step.
    """
    kernels, steps = profile.trace.kernels, len(profile.steps)
    number, inside = steps_of(kernels.launched_s, profile.steps)
    chosen = kernels.function.codes_where(lambda function: family(function.name) in FAMILIES) & inside
    order = np.lexsort((kernels.start_s, kernels.stream, kernels.device))
    is_one, lasts_s = chosen[order], (kernels.end_s - kernels.start_s)[order]
    if not is_one.any():
        return {"fusable_per_step": 0.0, "time_s": 0.0, "saved_s": 0.0}
    place = np.stack([kernels.device, kernels.stream, number])[:, order]
    begins = np.append(True, ~(is_one[1:] & is_one[:-1] & (place[:, 1:] == place[:, :-1]).all(0)))
    first = np.flatnonzero(begins)
    count = np.diff(np.append(first, len(is_one)))
    whole_s, most_s = np.add.reduceat(lasts_s, first), np.maximum.reduceat(lasts_s, first)
    runs = is_one[first] & (count > 1)
    return {
        "fusable_per_step": float(count[runs].sum()) / steps,
        "time_s": float(whole_s[runs].sum()) / steps,
        "saved_s": float((whole_s - most_s)[runs].sum()) / steps,
    }
