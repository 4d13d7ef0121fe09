"""Two profiles held against each other: where B's kernel time differs from A's. Floor 0."""

from __future__ import annotations

from collections import Counter

from cs_systems.analysis.families import family
from cs_systems.analysis.profile import Profile
from cs_systems.record import Row

BY = ("phase", "family", "layer")


def difference(a: Profile, b: Profile, by: str) -> list[Row]:
    """The kernel time of a step split by `phase`, `family` or `layer`: {by, a_s, b_s, difference_s, share}, the largest
    difference first, `all` at the end. The share is of all kernel time of A, so that shares add up to the whole
    change; what one side has no kernel of took 0 s there."""
    times_a, times_b = _times(a, by), _times(b, by)
    names = sorted({*times_a, *times_b}, key=lambda name: -abs(times_b[name] - times_a[name]))
    whole_a, whole_b = sum(times_a.values()), sum(times_b.values())
    pairs = [*((name, times_a[name], times_b[name]) for name in names), ("all", whole_a, whole_b)]
    return [
        {by: name, "a_s": left, "b_s": right, "difference_s": right - left, "share": (right - left) / whole_a}
        for name, left, right in pairs
    ]


def doubts(a: Profile, b: Profile) -> list[str]:
    """Why to be careful with the comparison."""
    said = []
    for name, profile in (("A", a), ("B", b)):
        said.append(f"{name}: {len(profile.steps)} steps; {profile.coverage}")
        said += [f"{name}: {note}" for note in profile.notes]
    devices = [sorted(set(p.recording.devices.values())) for p in (a, b)]
    if devices[0] != devices[1]:
        said.append(f"device differs: {', '.join(devices[0]) or 'unknown'} in A, {', '.join(devices[1]) or 'unknown'} in B")
    if a.recording.profiler != b.recording.profiler:
        said.append(f"recorded by {a.recording.profiler} in A, by {b.recording.profiler} in B: they slow the host unequally")
    return said


def _times(profile: Profile, by: str) -> Counter[str]:
    """Kernel time of one step in s; a Counter, so that what is not there is 0."""
    times: Counter[str] = Counter()
    for (function, place), total in profile.groups.items():
        name = family(function.name) if by == "family" else getattr(place, by)
        times[name] += total.time_s / len(profile.steps)  # type: ignore[assignment]
    return times
