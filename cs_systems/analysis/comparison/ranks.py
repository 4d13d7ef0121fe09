"""Ranks of one job, from the trace of each: the work of each rank, and how the collectives match.

A collective is matched across ranks by its process group and sequence number where the traces have them, else by its
order among the collectives of its kind in the same step. The clocks of the ranks are aligned by the ends of matched
collectives, which all ranks of a group reach together. Then, for each collective:

- waiting is the time by which a rank was early: from its own arrival to the last rank's;
- transfer lasts from the arrival of the last rank to the end on the last rank.

No collective ends on a rank before all ranks have arrived; a match that contradicts this is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Annotated, NamedTuple, TypedDict

import numpy as np

from cs_systems.analysis.attribution.collectives import Collective, collectives, computing, computing_by_phase
from cs_systems.analysis.attribution.overlap import NOTHING, Intervals, intersection, of_kernels, streams, union
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.analysis.attribution.usual_steps import usual_steps
from cs_systems.analysis.comparison.rank_work import Longer, Works, longer, works
from cs_systems.config import ConfigError
from cs_systems.core.collectives import BUS_FACTORS, algbw, busbw
from cs_systems.core.tables import Column, by_name, first, table
from cs_systems.core.units import counted, human
from cs_systems.readers.forms.jobs import PAIRWISE, TOGETHER, Job
from cs_systems.readers.forms.trace import Step, Trace

TOLERANCE_S = 100e-6  # remaining difference between aligned clocks
APART_S = 60.0  # between recordings; ranks of one job are recorded together
MOST_TOLD = 4  # number of ranks with a sentence of their own; larger jobs only have the table
MOST_BESIDE = 2  # kinds of computation that are named next to a collective


class JobRankRow(TypedDict):
    """Rank of a job, from the traces of its ranks; times are of one step."""

    rank: int
    steps: int
    step_s: float
    busy_share: float | None  # share of the step
    compute_s: float
    communication_s: Annotated[float, Column("comm.")]
    exposed_s: float  # communication alone
    idle_s: float
    waiting_s: float | None  # waiting for the last rank to arrive at each collective
    transfer_s: float | None  # time from the arrival of the last rank
    late_s: float | None  # delay after the first rank to arrive, mean of a collective
    last_share: float | None  # share of the collectives at which the rank arrived last
    host: str | None
    file: Annotated[str, Column(beside=50)]


class CollectiveRow(TypedDict):
    """Collectives of one kind, group and size in the traces of a job's ranks; times are means of one call."""

    collective: str
    group: str | None
    ranks: int
    size_bytes: int | None  # as defined in `core.collectives`
    calls_per_step: Annotated[float, Column("calls", drop=8)]
    time_s: float
    waiting_s: float
    transfer_s: float
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    hidden_share: float | None  # share of the time
    beside: str | None  # phase and family of the kernels that ran the longest meanwhile


@dataclass(frozen=True)
class Rank:
    """Summary of one rank's trace; times are of one step, the mean over its steps."""

    rank: int
    source: str
    profiler: str
    job: Job
    length_s: float
    steps: int
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    collectives: tuple[Collective, ...]
    incomplete: str | None = None  # description of missing kernels after a fault
    computing: Intervals = NOTHING  # by the rank's own clock
    host_s: float = 0.0  # time of the host's own work
    works: Works = field(default_factory=dict)
    usual: str = ""  # name of the usual steps, if others are left out
    phases: Mapping[str, Intervals] = field(default_factory=dict)  # phase, or "copies" → when the rank computed it
    marks: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Match:
    """One collective on all ranks of its group, by aligned clocks; `start_s` and `end_s` map ranks to times."""

    calls: Mapping[int, Collective]
    start_s: Mapping[int, float]
    end_s: Mapping[int, float]

    @property
    def any(self) -> Collective:
        return next(iter(self.calls.values()))

    @property
    def arrived_s(self) -> float:
        return max(self.start_s.values())

    @property
    def transfer_s(self) -> float:
        return max(self.end_s.values()) - self.arrived_s

    def waiting_s(self, rank: int) -> float:
        return self.arrived_s - self.start_s[rank]

    def late_s(self, rank: int) -> float:
        return self.start_s[rank] - min(self.start_s.values())


@dataclass(frozen=True)
class Merged:
    """All ranks of a job with their matched collectives."""

    ranks: tuple[Rank, ...]
    matches: tuple[Match, ...]
    notes: tuple[str, ...]
    offset_s: Mapping[int, float] = field(default_factory=dict)  # how far each rank's clock is ahead of the first's

    @property
    def step_s(self) -> float:
        """Duration of a step on the slowest rank."""
        return max(one.step_s for one in self.ranks)

    def times_of(self, one: Rank) -> RankTimes | None:
        """Return a rank's times of waiting and transfer; None if nothing was matched."""
        mine = [match for match in self.matches if one.rank in match.calls]
        if not mine:
            return None
        start = np.array([match.calls[one.rank].start_s for match in mine])
        waits = union(start, start + np.array([match.waiting_s(one.rank) for match in mine]))
        ends = np.array([match.calls[one.rank].end_s for match in mine])
        calls = union(start, ends)
        waiting_s = intersection(waits, calls).length_s
        hidden_s, hidden_waiting_s = (intersection(each, one.computing).length_s for each in (calls, waits))
        exposed_s = max(0.0, calls.length_s - hidden_s)
        exposed_waiting_s = min(exposed_s, max(0.0, waits.length_s - hidden_waiting_s))
        return RankTimes(
            waiting_s / one.steps,
            max(0.0, calls.length_s - waiting_s) / one.steps,
            exposed_waiting_s / one.steps,
            (exposed_s - exposed_waiting_s) / one.steps,
        )


class RankTimes(NamedTuple):
    """Times per step that one rank spends in collectives; simultaneous collectives count once.

    Waiting is for the last rank to arrive; exposed means without simultaneous computation.
    """

    waiting_s: float
    transfer_s: float
    exposed_waiting_s: float
    exposed_transfer_s: float


@dataclass(frozen=True)
class Straggler:
    """Rank for which the others wait.

    Attributes:
        rank: its number.
        delay_s: time per step between the arrival of the second-to-last rank and its own arrival, when it is the last.
        more_s: this minus the delay by any other rank, because ranks may take turns in being late.
        last: the number of collectives at which it arrives last, out of `of`.
        least_s: lower bound of the step without the delay: time of the slowest other rank without waiting.
        does_longer: the work in which it takes longer; None if none explains half of the lost time.
    """

    rank: int
    delay_s: float
    more_s: float
    last: int
    of: int
    least_s: float
    does_longer: Longer | None

    @property
    def in_words(self) -> str:
        return f"last to arrive in {self.last} of {self.of} collectives"


def summary(profile: Profile, rank: int) -> Rank:
    """Return the summary of one rank's trace, of its usual steps."""
    usual = usual_steps(profile) if len(profile.trace.kernels) else None
    profile = usual.profile if usual else profile
    trace, count = profile.trace, len(profile.steps)
    total = Counter[str]()
    for one in of_kernels(trace, profile.steps) if len(trace.kernels) else streams(trace):
        total.update(one.row())
    step_s, compute_s = usual.step_s if usual else total["step_s"] / count, total["compute_s"] / count
    calls, computed = tuple(collectives(profile)), computing(profile)
    running = union(np.array([call.start_s for call in calls]), np.array([call.end_s for call in calls]))
    exposed_s = max(0.0, running.length_s - intersection(running, computed).length_s) / count
    done, host_s = works(profile)
    return Rank(
        rank,
        trace.source,
        trace.profiler,
        trace.job or Job(),
        _length_s(trace),
        count,
        step_s=step_s,
        compute_s=compute_s,
        communication_s=running.length_s / count,
        exposed_s=exposed_s,
        idle_s=max(0.0, step_s - compute_s - exposed_s),
        collectives=calls,
        incomplete=profile.incomplete,
        computing=computed,
        host_s=host_s,
        works=done,
        usual=usual.name if usual else "",
        phases=computing_by_phase(profile),
        marks=tuple(profile.steps),
    )


def _length_s(trace: Trace) -> float:
    return float(
        max((column.max() for column in (trace.kernels.end_s, trace.ranges.end_s) if len(column)), default=0.0)
    )


def merged(ranks: Sequence[Rank]) -> Merged:
    """Return the ranks with their collectives matched.

    Raises:
        ConfigError: The traces cannot be of one job.
    """
    ranks = tuple(sorted(ranks, key=lambda one: one.rank))
    check(ranks)
    pairs, lost = _matched(ranks)
    offset_s = _offsets([one.rank for one in ranks], pairs)
    matches, impossible = [], 0
    for calls in pairs:
        start = {rank: call.start_s - offset_s[rank] for rank, call in calls.items()}
        end = {rank: call.end_s - offset_s[rank] for rank, call in calls.items()}
        together = next(iter(calls.values())).name in TOGETHER
        if together and max(start.values()) > min(end.values()) + TOLERANCE_S:
            impossible += 1
        else:
            matches.append(Match(calls, start, end))
    notes = tuple(_notes(ranks, matches, lost, impossible, offset_s))
    if impossible > len(matches):
        matches, offset_s = [], dict.fromkeys(offset_s, 0.0)
    return Merged(ranks, tuple(sorted(matches, key=lambda match: match.arrived_s)), notes, offset_s)


def check(ranks: Sequence[Rank]) -> None:
    """Raise ConfigError if the traces cannot be of one job."""
    reasons = []
    by_rank = defaultdict(list)
    for one in ranks:
        by_rank[one.rank].append(one.source)
    if twice := next((pair for pair in by_rank.items() if len(pair[1]) > 1), None):
        reasons.append(f"{' and '.join(twice[1][:2])} are both of rank {twice[0]}")
    sizes = {one.job.world_size: one.source for one in ranks if one.job.world_size}
    if len(sizes) > 1:
        reasons.append(" and ".join(f"{source} is of a job of {size} ranks" for size, source in sizes.items()))
    profilers = {one.profiler: one.source for one in ranks}
    if len(profilers) > 1:
        reasons.append(" and ".join(f"{source} is a trace of {name}" for name, source in profilers.items()))
    known = [(one.job.began_s, one) for one in ranks if one.job.began_s is not None]
    for (began_s, one), (later_s, after) in pairwise(sorted(known, key=itemgetter(0))):
        gap_s = later_s - began_s - one.length_s
        if gap_s > APART_S:
            reasons.append(f"{after.source} begins {human(gap_s, 's')} after {one.source} ends")
            break
    if reasons:
        raise ConfigError(
            f"the traces cannot be merged as the ranks of one job: {reasons[0]}; give one trace of each rank, all of "
            "one job and one profiler"
        )


def _matched(ranks: Sequence[Rank]) -> tuple[list[dict[int, Collective]], int]:
    """Return (matches, lost): each match maps the ranks of a group to their call; lost calls have no match."""
    calls = {one.rank: [call for call in one.collectives if call.name not in PAIRWISE] for one in ranks}
    numbered = all(call.sequence is not None for own in calls.values() for call in own)
    tables: dict[int, dict[tuple[object, ...], list[Collective]]] = {}
    members: dict[str, set[int]] = defaultdict(set)
    for rank, own in calls.items():
        tables[rank] = defaultdict(list)
        for call in own:
            members[call.group].add(rank)
            tables[rank][call.group, call.name, call.sequence if numbered else call.step].append(call)
    found: list[dict[int, Collective]] = []
    for key in dict.fromkeys(key for found_in in tables.values() for key in found_in):
        of = sorted(members[str(key[0])])
        listed = [tables[rank].get(key, []) for rank in of]
        if len(of) > 1 and len({*map(len, listed)}) == 1:
            found += [dict(zip(of, same, strict=True)) for same in zip(*listed, strict=True)]
    return found, sum(map(len, calls.values())) - sum(map(len, found))


def _offsets(ranks: Sequence[int], pairs: Sequence[Mapping[int, Collective]]) -> dict[int, float]:
    """Return how far each rank's clock is ahead of the first rank's; NaN if no collective connects them."""
    ahead: dict[tuple[int, int], list[float]] = defaultdict(list)
    usual = [calls for calls in pairs if next(iter(calls.values())).name in TOGETHER] or pairs
    for calls in usual:
        first = next(iter(calls))
        for other in calls:
            if other != first:
                ahead[first, other].append(calls[other].end_s - calls[first].end_s)
    steps: dict[int, dict[int, float]] = defaultdict(dict)
    for (a, b), found in ahead.items():
        steps[a][b] = median(found)
        steps[b][a] = -steps[a][b]
    offset_s: dict[int, float] = {}
    for origin in ranks:  # ranks that no collective connects to the first have their own reference clock
        reached = [origin] if origin not in offset_s else []
        offset_s.update(dict.fromkeys(reached, 0.0))
        for rank in reached:
            for other, step in steps[rank].items():
                if other not in offset_s:
                    offset_s[other] = offset_s[rank] + step
                    reached.append(other)
    return offset_s


def _notes(
    ranks: Sequence[Rank], matches: Sequence[Match], lost: int, impossible: int, offset_s: Mapping[int, float]
) -> list[str]:
    notes = [f"rank {one.rank}: {one.incomplete}" for one in ranks if one.incomplete]
    world = next((one.job.world_size for one in ranks if one.job.world_size), None)
    if world and world > len(ranks):
        given = ", ".join(str(one.rank) for one in ranks[:8]) + (" …" if len(ranks) > 8 else "")
        notes.append(f"{len(ranks)} of {world} ranks are given ({given}): a rank may wait for one that is not")
    usual = [one for one in ranks if one.usual]
    notes += [f"rank {one.rank}: {one.usual} alone, without start-up and slow steps" for one in usual[:MOST_TOLD]]
    if not usual and len({one.steps for one in ranks}) > 1:
        notes.append(f"the ranks recorded different numbers of steps: {', '.join(str(one.steps) for one in ranks)}")
    if pairwise := sum(call.name in PAIRWISE for one in ranks for call in one.collectives):
        notes.append(f"{pairwise} sends and receives are not matched: their kernels do not name the other rank")
    if impossible > len(matches):
        notes.append(
            f"the collectives do not fit together: in {impossible} of {impossible + len(matches)} a rank ends before "
            "another begins, so waiting and the straggler are unknown; the traces lack events, or are of different "
            "steps or jobs"
        )
        return notes
    if not matches:
        notes.append("no collective could be matched across the ranks, so waiting and the straggler are unknown")
        return notes
    by = "sequence number" if matches[0].any.sequence is not None else "order within the step"
    ends = [max(m.end_s.values()) - min(m.end_s.values()) for m in matches if m.any.name in TOGETHER]
    spread = f"; their ends agree within {human(max(median(ends), 1e-9), 's')}" if ends else ""
    notes.append(f"{len(matches)} collectives are matched across the ranks, by {by}{spread}")
    began_s = {one.rank: one.job.began_s for one in ranks}
    if None not in began_s.values() and len({one.job.host for one in ranks}) > 1:
        ahead = [offset_s[rank] + (began or 0.0) for rank, began in began_s.items()]
        notes.append(f"the hosts' clocks differ by up to {human(max(ahead) - min(ahead), 's')}; this is corrected")
    if lost and not usual:
        notes.append(f"{lost} calls of collectives have no counterpart on another rank and are left out")
    if impossible:
        notes.append(f"left out: {counted(impossible, 'match', 'matches')} in which a rank ends before another begins")
    return notes


@table(
    "ranks, per step",
    "rank step_s busy_share compute_s communication_s exposed_s waiting_s late_s last_share",
    name="ranks",
    brief=first(8),
    notes=(
        "compute: kernels other than collectives, and copies; waiting: for the last rank to arrive; late: behind "
        "the first rank, mean of a collective; last: share of the collectives in which the rank arrived last",
    ),
)
def rank_rows(job: Merged) -> list[JobRankRow]:
    """Return one row for each rank, per step; waiting and lateness are None where nothing was matched."""
    rows: list[JobRankRow] = []
    for one in job.ranks:
        mine = [match for match in job.matches if one.rank in match.calls]
        times = job.times_of(one)
        rows.append(
            {
                "rank": one.rank,
                "steps": one.steps,
                "step_s": one.step_s,
                "busy_share": (one.compute_s + one.exposed_s) / one.step_s if one.step_s else None,
                "compute_s": one.compute_s,
                "communication_s": one.communication_s,
                "exposed_s": one.exposed_s,
                "idle_s": one.idle_s,
                "waiting_s": times.waiting_s if times else None,
                "transfer_s": times.transfer_s if times else None,
                "late_s": sum(match.late_s(one.rank) for match in mine) / len(mine) if mine else None,
                "last_share": sum(not match.waiting_s(one.rank) for match in mine) / len(mine) if mine else None,
                "host": one.job.host,
                "file": one.source,
            }
        )
    return rows


@table(
    "collectives across the ranks, mean of one call",
    "collective ranks size_bytes calls_per_step waiting_s transfer_s algbw_bytes_per_s busbw_bytes_per_s",
    name="collectives",
    brief=first(4),
    notes=("transfer: from the arrival of the last rank; the bandwidths are of the transfer alone",),
    most=20,
)
def collective_rows(job: Merged) -> list[CollectiveRow]:
    """Return one row for each kind, group and size of collective, the longest first; times are means of one call.

    Bandwidths are of the transfer alone: from the arrival of the last rank.
    """
    groups: dict[tuple[str, str, int | None], list[Match]] = defaultdict(list)
    for match in job.matches:
        groups[match.any.name, match.any.group, match.any.size_bytes].append(match)
    steps = max(one.steps for one in job.ranks)
    rows: list[CollectiveRow] = []
    for (name, group, size), found in groups.items():
        world = found[0].any.ranks or len(found[0].calls)
        calls = [call for match in found for call in match.calls.values()]
        transfer_s = sum(match.transfer_s for match in found) / len(found)
        total_s = sum(call.end_s - call.start_s for call in calls)
        has_rate = size is not None and transfer_s > 0 and name in BUS_FACTORS
        beside = Counter[str]()
        for call in calls:
            beside.update(call.beside_s)
        rows.append(
            {
                "collective": name,
                "group": group or None,
                "ranks": world,
                "size_bytes": size,
                "calls_per_step": len(found) / steps,
                "time_s": total_s / len(calls),
                "waiting_s": sum(m.waiting_s(r) for m in found for r in m.calls) / len(calls),
                "transfer_s": transfer_s,
                "algbw_bytes_per_s": algbw(size, transfer_s) if has_rate and size else None,
                "busbw_bytes_per_s": busbw(name, size, world, transfer_s) if has_rate and size else None,
                "hidden_share": sum(call.hidden_s for call in calls) / total_s if total_s else None,
                "beside": ", ".join(label for label, _ in beside.most_common(MOST_BESIDE)) or None,
            }
        )
    return sorted(rows, key=lambda row: -row["time_s"] * row["calls_per_step"])


def straggler(job: Merged) -> Straggler | None:
    """Return the rank that delays the others the most; None if unknown.

    Without its delay, the step lasts as long as the slowest other rank works on its host or GPU without waiting.
    """
    if not job.matches:
        return None
    spans, last = defaultdict[int, list[tuple[float, float]]](list), Counter[int]()
    for match in job.matches:
        *_, (before_s, _), (arrived_s, rank) = sorted((start_s, rank) for rank, start_s in match.start_s.items())
        spans[rank].append((before_s, arrived_s))
        last[rank] += 1
    delays_s = {one.rank: 0.0 for one in job.ranks}
    delays_s |= {rank: union(*np.array(found).T).length_s for rank, found in spans.items()}
    rank = max(delays_s, key=lambda rank: delays_s[rank])
    own = next(one for one in job.ranks if one.rank == rank)
    others = [one for one in job.ranks if one is not own]
    delay_s = min(delays_s[rank] / own.steps, job.step_s)
    least_s = min(job.step_s, max(job.step_s - delay_s, *(_alone_s(job, one) for one in others)))
    does_longer = longer(own.works, [one.works for one in others], job.step_s - least_s)
    more_s = (delays_s[rank] - sorted(delays_s.values())[-2]) / own.steps
    return Straggler(rank, delay_s, more_s, last[rank], len(job.matches), least_s, does_longer)


def _alone_s(job: Merged, one: Rank) -> float:
    """Return the time of a rank's step without waiting for others: on its host, or on its GPU if longer."""
    times = job.times_of(one)
    return max(one.host_s, one.compute_s + (times.exposed_transfer_s if times else 0.0))


def leading(job: Merged) -> Rank:
    """Return the rank that determines the step's duration by its own work: it waits the least for the others."""
    return min(job.ranks, key=lambda one: times.exposed_waiting_s if (times := job.times_of(one)) else 0.0)


def in_words(job: Merged) -> list[str]:
    """Return a sentence for each rank that separates waiting from transfer, for jobs of few ranks."""
    told = [(one, times) for one in job.ranks[:MOST_TOLD] if (times := job.times_of(one))]
    return [
        f"rank {one.rank}: {human(times.exposed_waiting_s + times.exposed_transfer_s, 's')} of each step are "
        f"communication without computation beside it: {human(times.exposed_waiting_s, 's')} waiting for other ranks, "
        f"{human(times.exposed_transfer_s, 's')} transfer"
        for one, times in (told if len(job.ranks) <= MOST_TOLD else [])
    ]


beside = replace(
    collective_rows,
    name="beside",
    caption="computation beside the collectives, mean of one call on one rank",
    shown="collective size_bytes group time_s hidden_share beside",
    notes=("hidden: share of the time in which the rank also computed; beside: what it computed the longest",),
)
TABLES = by_name(rank_rows, collective_rows, beside)
