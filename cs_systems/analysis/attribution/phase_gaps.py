"""Time in which the device waits for the launches of one phase: the gaps before its kernels."""

from __future__ import annotations

import numpy as np

from cs_systems.analysis.attribution.gaps import LAUNCH, causes
from cs_systems.analysis.attribution.profile import Profile


def launch_waits_s(profile: Profile, phase: str) -> float:
    """Return the time of a mean step in which the first device waits for launches of kernels of this phase."""
    device, kernels = profile.devices[0], profile.trace.kernels
    gaps = profile.gaps[device]
    own = np.flatnonzero(kernels.device == device)
    of_phase = np.array([place.phase == phase for place in profile.places.values], bool)[profile.places.codes[own]]
    following = np.searchsorted(kernels.start_s[own], gaps.end_s)  # the kernel that ends the gap
    inside = following < len(own)
    counts = np.zeros(len(gaps.step), bool)
    counts[inside] = of_phase[following[inside]]
    return float(causes(profile.trace, device, gaps)[LAUNCH][counts].sum()) / len(profile.steps)
