"""All ranks of a job on one timeline, as plain data for the page that draws them.

Times are whole nanoseconds by the first rank's clock, from the earliest step. A collective is drawn as the time in
which its rank waits for the last one to arrive, and the transfer. Computation is merged by phase, the coarser the more
there is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypedDict

import numpy as np

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.overlap import Intervals
from cs_systems.analysis.comparison.ranks import Match, Merged, Rank
from cs_systems.core.units import counted, human
from cs_systems.readers.forms.jobs import TOGETHER

MOST_CALLS = 120_000  # most calls of collectives drawn, of all ranks; of more, the first
MOST_SPANS = 200_000  # most boxes of computation drawn; of more, those that are close to each other are joined
MOST_NAMED = 8  # most ranks named in a sentence
WAITING, TRANSFER, UNKNOWN = range(3)  # states of a box of communication


class StepColumns(TypedDict):
    """Columns of the first rank's steps."""

    number: list[int]
    start: list[int]
    duration: list[int]


class ComputeColumns(TypedDict):
    """Columns of one rank's computation; `phase` is an index in `phases`."""

    start: list[int]
    duration: list[int]
    phase: list[int]


class CallColumns(TypedDict):
    """Columns of one rank's communication; `kind` and `match` are indices in the lists of the view."""

    start: list[int]
    duration: list[int]
    state: list[int]  # WAITING, TRANSFER or, of a call without counterparts, UNKNOWN
    kind: list[int]
    match: list[int | None]


class KindRow(TypedDict):
    """Calls of one name, group and size."""

    name: str
    group: str
    bytes: int | None


class MatchColumns(TypedDict):
    """Columns of the matched collectives: the rank that arrived last, and the time from its arrival to the end."""

    last: list[int]
    transfer: list[int]


class RankView(TypedDict):
    """One rank."""

    rank: int
    host: str | None
    compute: ComputeColumns
    calls: CallColumns


class RanksView(TypedDict):
    """Data of the page of several ranks.

    joined_ns: pauses of computation up to this length are not drawn. hidden_calls: number of later calls that are not.
    """

    end_ns: int
    steps: StepColumns
    phases: list[str]
    kinds: list[KindRow]
    matches: MatchColumns
    ranks: list[RankView]
    joined_ns: int
    hidden_calls: int
    clocks: str  # how the clocks are aligned, and how well


class _Box(NamedTuple):
    start_s: float
    end_s: float
    state: int
    call: Collective
    match: int | None


def view(job: Merged) -> RanksView:
    """Return the data of the page."""
    ahead_s = clocks_ahead(job)
    start_s = min(_first_s(one, ahead_s) for one in job.ranks)
    boxes = _boxes(job, ahead_s)
    until_s = _until(boxes)
    spans, gap_s = _spans(job, ahead_s, until_s)
    kinds: dict[tuple[str, str, int | None], int] = {}
    phases = {phase: number for number, phase in enumerate(dict.fromkeys(p for one in job.ranks for p in one.phases))}
    ranks = [
        RankView(
            rank=one.rank,
            host=one.job.host,
            compute=_compute(spans[one.rank], phases, start_s),
            calls=_calls([box for box in boxes[one.rank] if box.start_s <= until_s], kinds, start_s),
        )
        for one in job.ranks
    ]
    first = job.ranks[0]
    marks = [mark for mark in first.marks if mark.start_s <= until_s]  # by the clock that the others are ahead of
    ends = [a + b for one in ranks for own in (one["compute"], one["calls"]) for a, b in _pairs(own)]
    begins, lasts = _columns([m.start_s for m in marks], [m.end_s for m in marks], start_s)
    return {
        "end_ns": max([1, *ends, *(a + b for a, b in zip(begins, lasts, strict=True))]),
        "steps": {"number": [mark.number for mark in marks], "start": begins, "duration": lasts},
        "phases": list(phases),
        "kinds": [{"name": name, "group": group, "bytes": size} for name, group, size in kinds],
        "matches": {
            "last": [max(match.start_s, key=lambda rank: match.start_s[rank]) for match in job.matches],
            "transfer": [round(match.transfer_s * 1e9) for match in job.matches],
        },
        "ranks": ranks,
        "joined_ns": round(gap_s * 1e9),
        "hidden_calls": sum(box.start_s > until_s and box.state != WAITING for own in boxes.values() for box in own),
        "clocks": clocks(job),
    }


def clocks_ahead(job: Merged) -> dict[int, float]:
    """Return how far each rank's clock is ahead of the first one's.

    Ranks that no collective connects to the first are placed by the recorded clocks of their hosts, if these are known.
    """
    began_s = {one.rank: one.job.began_s for one in job.ranks}
    origin_s, found, groups = began_s[job.ranks[0].rank], dict[int, float](), _groups(job)
    for rank, offset_s in job.offset_s.items():
        reference_s = began_s[min(_connected(groups, rank))]  # of the clock that the offset refers to
        found[rank] = offset_s + (0.0 if origin_s is None or reference_s is None else origin_s - reference_s)
    return found


def clocks(job: Merged) -> str:
    """Return a sentence on how the ranks' clocks are aligned, and how well."""
    ends = [max(match.end_s.values()) - min(match.end_s.values()) for match in _aligning(job)]
    first = job.ranks[0].rank
    alone = sorted({one.rank for one in job.ranks} - _connected(_groups(job), first))
    text = ""
    if ends:
        text = (
            f"Clocks are aligned by the ends of {counted(len(ends), 'collective')}. Afterwards the ends of one differ "
            f"by {human(max(median(ends), 1e-9), 's')} in the median and at most {human(max(*ends, 1e-9), 's')}: "
            "shorter waits are uncertain. "
        )
    if alone:
        named = ", ".join(map(str, alone[:MOST_NAMED])) + (" …" if len(alone) > MOST_NAMED else "")
        ranks = "rank" if len(alone) == 1 else "ranks"
        text += f"No collective connects {ranks} {named} with rank {first}: "
        known = all(one.job.began_s is not None for one in job.ranks)
        text += "times there are by the hosts' clocks, which may differ." if known else "do not compare their times."
    return text.strip()


def _aligning(job: Merged) -> list[Match]:
    """Return the matches that align the clocks, by their ends."""
    return [match for match in job.matches if match.any.name in TOGETHER] or [*job.matches]


def _groups(job: Merged) -> set[frozenset[int]]:
    """Return the sets of ranks with clocks that a collective aligns."""
    return {frozenset(match.calls) for match in _aligning(job)}


def _connected(groups: Collection[frozenset[int]], rank: int) -> set[int]:
    """Return the ranks with clocks aligned with one rank's, itself included."""
    found = {rank}
    while near := {other for group in groups if group & found for other in group} - found:
        found |= near
    return found


def _first_s(one: Rank, ahead_s: Mapping[int, float]) -> float:
    times = [mark.start_s for mark in one.marks] + [call.start_s for call in one.collectives]
    return min(times, default=0.0) - ahead_s[one.rank]


def _boxes(job: Merged, ahead_s: Mapping[int, float]) -> dict[int, list[_Box]]:
    """Return the communication of each rank, in order of time."""
    found: dict[int, list[_Box]] = {one.rank: [] for one in job.ranks}
    matched = set[int]()
    for number, match in enumerate(job.matches):
        matched |= {id(call) for call in match.calls.values()}
        for rank, call in match.calls.items():
            begin_s, end_s = call.start_s - ahead_s[rank], call.end_s - ahead_s[rank]
            arrived_s = min(begin_s + max(match.waiting_s(rank), 0.0), end_s)
            if arrived_s > begin_s:
                found[rank].append(_Box(begin_s, arrived_s, WAITING, call, number))
            found[rank].append(_Box(arrived_s, end_s, TRANSFER, call, number))
    for one in job.ranks:
        own, own_s = found[one.rank], ahead_s[one.rank]
        own += [
            _Box(call.start_s - own_s, call.end_s - own_s, UNKNOWN, call, None)
            for call in one.collectives
            if id(call) not in matched
        ]
        own.sort(key=lambda box: box.start_s)
    return found


def _until(boxes: dict[int, list[_Box]]) -> float:
    """Return the time up to which MOST_CALLS calls begin."""
    starts = sorted(box.start_s for own in boxes.values() for box in own)
    return starts[MOST_CALLS - 1] if len(starts) > MOST_CALLS else float("inf")


def _spans(job: Merged, ahead_s: Mapping[int, float], until_s: float) -> tuple[dict[int, dict[str, Intervals]], float]:
    """Return each rank's computation by phase, by aligned clocks, and the length of the pauses that are closed."""
    spans = {one.rank: _within(one, ahead_s[one.rank], until_s) for one in job.ranks}
    gap_s = 0.0
    while sum(len(own.start_s) for by_phase in spans.values() for own in by_phase.values()) > MOST_SPANS:
        gap_s = 2 * gap_s or 1e-6
        spans = {
            rank: {phase: joined(own, gap_s) for phase, own in by_phase.items()} for rank, by_phase in spans.items()
        }
    return spans, gap_s


def _within(one: Rank, ahead_s: float, until_s: float) -> dict[str, Intervals]:
    """Return the computation of the rank's steps by phase, by aligned clocks."""
    first_s = min((mark.start_s for mark in one.marks), default=0.0) - ahead_s
    ends = [mark.end_s for mark in one.marks] + [call.end_s for call in one.collectives]
    last_s = min(max(ends, default=0.0) - ahead_s, until_s)
    found = {}
    for phase, own in one.phases.items():
        begin_s, end_s = own.start_s - ahead_s, own.end_s - ahead_s
        inside = (end_s > first_s) & (begin_s < last_s)
        found[phase] = Intervals(begin_s[inside], end_s[inside])
    return found


def joined(own: Intervals, gap_s: float) -> Intervals:
    """Return the intervals without the pauses up to a length."""
    if not len(own.start_s):
        return own
    apart = own.start_s[1:] - own.end_s[:-1] > gap_s
    return Intervals(own.start_s[np.append(True, apart)], own.end_s[np.append(apart, True)])


def _compute(by_phase: dict[str, Intervals], phases: dict[str, int], start_s: float) -> ComputeColumns:
    found = [
        (start, duration, phases[phase])
        for phase, own in by_phase.items()
        for start, duration in zip(*_columns(own.start_s.tolist(), own.end_s.tolist(), start_s), strict=True)
    ]
    found.sort()
    return {"start": [a for a, _, _ in found], "duration": [b for _, b, _ in found], "phase": [c for _, _, c in found]}


def _calls(boxes: Sequence[_Box], kinds: dict[tuple[str, str, int | None], int], start_s: float) -> CallColumns:
    begins, lasts = _columns([box.start_s for box in boxes], [box.end_s for box in boxes], start_s)
    keys = [(box.call.name, box.call.group, box.call.size_bytes) for box in boxes]
    return {
        "start": begins,
        "duration": lasts,
        "state": [box.state for box in boxes],
        "kind": [kinds.setdefault(key, len(kinds)) for key in keys],
        "match": [box.match for box in boxes],
    }


def _columns(begins_s: Sequence[float], ends_s: Sequence[float], start_s: float) -> tuple[list[int], list[int]]:
    """Return the starts and durations in ns since a time."""
    begins = [round((time_s - start_s) * 1e9) for time_s in begins_s]
    return begins, [round((end - start_s) * 1e9) - begin for end, begin in zip(ends_s, begins, strict=True)]


def _pairs(columns: ComputeColumns | CallColumns) -> Iterator[tuple[int, int]]:
    return zip(columns["start"], columns["duration"], strict=True)
