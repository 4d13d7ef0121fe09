"""Comparison of two traces: the difference of their kernel times, by phase, family or layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from statistics import mean
from typing import Annotated, TypedDict, cast

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.tables import ALL, mean_step_s, steps
from cs_systems.analysis.comparison import NAMED_FROM, SIDES
from cs_systems.analysis.comparison.runs import different
from cs_systems.config import ConfigError, Phase
from cs_systems.core.range_names import SPLITS, UNATTRIBUTED
from cs_systems.core.statistics import excess_s
from cs_systems.core.tables import Column, Row, Table
from cs_systems.core.units import human, signed
from cs_systems.record import RunRecord

# share of kernel time; above this difference, the layers of one side are known better than the other's
UNEQUAL = 0.05
MOST_FAMILIES = 3  # named in the sentence about a difference


class _Change(TypedDict):
    """Time in the baseline and in the candidate (None if unknown), and their difference."""

    a_s: Annotated[float | None, Column("baseline", own_unit=True)]
    b_s: Annotated[float | None, Column("candidate", own_unit=True)]
    difference_s: Annotated[float | None, Column("change", own_unit=True)]
    change_share: Annotated[float | None, Column("of baseline")]
    share: Annotated[float | None, Column("of all time")]


class DifferenceRow(_Change, total=False):
    """Kernel time of a step by phase, family or layer: one of the three names the row."""

    phase: str
    family: str
    layer: str


DIFFERENCES = {
    by: Table(
        "differences",
        DifferenceRow,
        f"kernel time per step by {by}, candidate compared with baseline",
        f"{by} a_s b_s difference_s change_share share",
    )
    for by in SPLITS.values()
}


def difference(a: Profile, b: Profile, by: str) -> list[DifferenceRow]:
    """Return the difference of the kernel time per step, by `phase`, `family` or `layer`.

    The largest difference comes first, and `all` last.

    `change_share` is the difference over a_s, the row's own time in the baseline, and None where that is 0. The share
    is the difference over all kernel time of the baseline, so that shares add up to the whole change. A family without
    a kernel on one side took 0 s there. A layer without a range on one side is unknown there: None.

    Raises:
        ConfigError: a side has no kernel.
    """
    for profile in (a, b):
        if not profile.trace.kernels:
            raise ConfigError(f"{profile.trace.source} contains no kernels; compare traces of a GPU")
    return _rows(_times(a, by), _times(b, by), by)


def opening(a: Profile, b: Profile) -> str:
    """Return the difference of a mean step in a sentence: wall time, idle time and the families of kernels.

    It speaks of the first device, and names no family if there are others. Without idle times, as in an incomplete
    trace, it speaks of the wall time alone.
    """
    (a_s, a_idle_s), (b_s, b_idle_s) = map(_mean_step, (a, b))
    if not a_s or not b_s:
        return ""
    said = f"a step of the candidate takes {human(b_s, 's')} instead of {human(a_s, 's')} ({b_s / a_s - 1:+.0%})"
    same = a.trace.profiler == b.trace.profiler
    said += f", {'both with the overhead of the profiler' if same else 'with the different overheads of two profilers'}"
    if a_idle_s is None or b_idle_s is None:
        return said
    rows = difference(a, b, "family")[:-1] if len(a.devices) == len(b.devices) == 1 else []
    changes = {row["family"]: row["difference_s"] for row in rows if row["difference_s"]}
    most_s = max(map(abs, changes.values()), default=0.0)
    shown = [name for name, change_s in changes.items() if abs(change_s) > NAMED_FROM * most_s]
    named = ", ".join(f"{name} {signed(changes[name], 's')}" for name in shown[:MOST_FAMILIES])
    busy_s = (b_s - b_idle_s) - (a_s - a_idle_s)
    idle = f"{signed(b_idle_s - a_idle_s, 's')} without a kernel on the GPU"
    return f"{said}: {idle}, {signed(busy_s, 's')} with one" + f" ({named})" * bool(named)


def _mean_step(profile: Profile) -> tuple[float | None, float | None]:
    """Return the mean wall time of a step and the first device's idle time in it, None where unknown."""
    rows = [row for row in steps(profile) if row["device"] == profile.devices[0]] if profile.devices else []
    idle_s = [row["wall_s"] * (1 - row["busy_share"]) for row in rows if row["busy_share"] is not None]
    return mean_step_s(rows), mean(idle_s) if idle_s else None


def difference_of_records(a: RunRecord, b: RunRecord, by: str) -> list[DifferenceRow]:
    """Return the `difference` from the tables of two profiled cells' records; empty if a table is missing."""
    name = next(table for table, of in SPLITS.items() if of == by)
    left, right = (record.results.get(name, ()) for record in (a, b))
    return _rows(_recorded(left, by), _recorded(right, by), by) if left and right else []


def _recorded(rows: Iterable[Row], by: str) -> Counter[str]:
    return Counter({row[by]: row["time_s"] for row in rows if by != "phase" or row["family"] == ALL})


def _rows(times_a: Counter[str], times_b: Counter[str], by: str) -> list[DifferenceRow]:
    whole_a, whole_b = times_a.total(), times_b.total()
    names = sorted(dict.fromkeys((*times_a, *times_b)), key=lambda name: -abs(times_b[name] - times_a[name]))
    rows: list[dict[str, object]] = []
    for name in names:
        left, right = (
            None if by == "layer" and name not in t and not _marked(t) else t[name] for t in (times_a, times_b)
        )
        rows.append({by: name, **_change(left, right, whole_a)})
    rows.append({by: ALL, **_change(whole_a, whole_b, whole_a)})
    return cast("list[DifferenceRow]", rows)


def _change(left: float | None, right: float | None, whole_s: float) -> _Change:
    change = None if left is None or right is None else excess_s(right, left)
    change_share, share = (change / of_s if change is not None and of_s else None for of_s in (left, whole_s))
    return {"a_s": left, "b_s": right, "difference_s": change, "change_share": change_share, "share": share}


def _marked(layers: Collection[str]) -> bool:
    """Return True if ranges name layers; optimizer and loss do not count, as their phase identifies them."""
    return bool({*layers} - {Phase.LOSS, Phase.OPTIMIZER, UNATTRIBUTED})


def doubts(a: Profile, b: Profile) -> list[str]:
    """Return the reasons to be careful with the comparison, other than an incomplete side."""
    sentences = []
    for name, profile in zip(SIDES, (a, b), strict=True):
        sentences.append(f"{name}: {len(profile.steps)} steps; {profile.coverage}")
        found = [note for note in (*profile.notes, *profile.how_layered) if note != profile.incomplete]
        sentences += [f"{name}: {note}" for note in found]
    shares = [p.layer_coverage for p in (a, b)]
    if abs(shares[0] - shares[1]) > UNEQUAL:
        sentences.append(
            f"the layer is known for {shares[0]:.0%} of the baseline's kernel time and {shares[1]:.0%} of the "
            "candidate's: part of the difference by layer is a difference in ranges"
        )
    devices = [sorted(set(p.trace.devices.values())) for p in (a, b)]
    if devices[0] != devices[1]:
        sentences.append(different("device", ", ".join(devices[0]), ", ".join(devices[1])))
    if a.trace.profiler != b.trace.profiler:
        sentences.append(f"{different('profiler', a.trace.profiler, b.trace.profiler)}, with different overheads")
    return sentences


def _times(profile: Profile, by: str) -> Counter[str]:
    """Return the kernel time of one step in s; a missing name counts as 0."""
    times: dict[str, float] = defaultdict(float)
    for (function, place), total in profile.groups.items():
        name = family(function.name) if by == "family" else getattr(place, by)
        times[name] += total.time_s / len(profile.steps)
    return Counter(times)
