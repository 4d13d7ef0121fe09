"""Ranks of a recorded loop: who waits for whom, and the time of transfers and of the search for unused parameters.

Each rank reports how long it waits in each of its collectives, in the same steps. The ranks leave a collective
together, so the rank that spends the least time in it arrived last:

- transfer is this shortest time: it includes everything that the operation costs on every rank;
- waiting is the rest of each rank's time;
- a rank that is last delays the others by the difference to the second-shortest time. Before that, the time for which
  each rank's thread waited for a core since the last collective is added: the machine causes this delay.

This needs no common clock. Numbers are medians over the steps, the lower one of two; for transfers, which a busy
machine lengthens, they are the lower quartile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, median_low
from typing import TypedDict

from cs_systems.analysis.comparison.late_ranks import EXPLAINS, is_uneven
from cs_systems.analysis.comparison.loop_findings import OTHER_PHASES, OWN_PYTHON, OwnPythonRow
from cs_systems.config import Phase
from cs_systems.core.statistics import largest
from cs_systems.core.tables import Row, Table
from cs_systems.readers.forms.jobs import FROM_ONE, PAIRWISE, TOGETHER

FEWEST = 2  # steps that all ranks observed
MOSTLY = 0.75  # share of the steps in which the same rank must be the last
SMALL_BYTES = 1 << 20  # a smaller all-reduce is limited by latency, not by bandwidth; PyTorch's first bucket has 1 MiB
MANY_SMALL = 8  # number of small calls in a step at which their latency adds up
MOST_COLLECTIVES = 8  # lines with collectives, those with the largest share
HALF = 0.5  # share of the parameters' bytes; above it, calls carry gradients or parameters
FEWEST_REPLICAS = 3  # steps in which the weights of all ranks are compared
EXCHANGED = 0.1  # share of a model's bytes; from it on, calls of a step may carry its gradients or weights, compressed
BATCH, COMPUTE, INPUT, PYTHON = "batch", "compute", "input", "python"
MODEL_PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)


class CallRow(TypedDict):
    """Call of a collective by one rank in a step."""

    name: str
    group: str  # name of its process group
    ranks: int  # size of that group
    size_bytes: int
    received: int  # elements that the rank holds after the call
    phase: str
    time_s: float  # time for which the loop or its stream waits in the call
    queued_s: float  # time for which the loop's thread waited for a core since the previous call; 0 on a GPU
    is_gradients: bool  # all-reduces of DistributedDataParallel that end one backward pass
    is_early: bool  # another backward pass follows without an update in between
    place: str | None  # the program's own line, such as `train.py:12`
    callee: str | None  # the function that this line calls
    option: str | None  # argument of DistributedDataParallel that leaves out its broadcast of buffers; None for others
    changed_bytes: int | None  # of these buffers, those that have changed since the last broadcast; None if unknown


class StepReport(TypedDict):
    """Step of one rank."""

    wall_s: float
    phases_s: dict[str, float]
    calls: list[CallRow]
    passes: int  # backward passes
    search_s: float  # host time of DistributedDataParallel's search for unused parameters
    queued_s: float  # time for which the loop's thread waited for a core, outside of the calls


class ReplicaReport(TypedDict):
    """Model of one rank in DistributedDataParallel that is trained without a call of DistributedDataParallel."""

    model: str
    parameters: int
    size_bytes: int
    ranks: list[int]  # those with a replica
    steps: dict[str, str]  # digest of the weights before the backward passes of a step, by its number
    function: str | None
    place: str | None  # line that calls the model itself with gradients


class RankReport(TypedDict):
    """Observation of one rank."""

    rank: int
    steps: dict[str, StepReport]  # steps by number
    wrapper: str  # the model's wrapper, by the names of `attribution.distribution`, or ""
    parameter_bytes: int
    bucket_bytes: list[int]
    marked: int  # parameters that DistributedDataParallel marks as used in a step; 0 if it does not search
    marking_s: float  # host time for marking them, measured separately
    unused: int | None  # largest number of parameters that a pass did not use; None if not searched
    own_python: Sequence[OwnPythonRow]
    elements: float | None  # elements of the models' inputs in a step
    replicas: list[ReplicaReport]


class LoopRankRow(TypedDict):
    """Rank of a loop; times are of one step."""

    rank: int
    steps: int
    step_s: float
    waiting_s: float  # waiting for the last rank to arrive at each collective
    pairwise_s: float  # time in sends and receives
    other_s: float  # time outside of the loop's phases, without communication
    leads: bool  # the others wait for this rank, and the record's own Python is from it


class LateRankRow(TypedDict):
    """Rank for which the others wait, and the work in which it takes longer than they do."""

    rank: int
    share: float  # share of the step by which it delays the others, beyond the delay by any other rank
    last: int  # number of steps in which it delays the others the most
    steps: int
    work: str  # BATCH, COMPUTE, INPUT or PYTHON; "" if nothing explains half of the delay
    phase: str
    extra_share: float  # share of the step by which this work takes longer
    batch_times: float | None  # size of its batch, as a multiple of the others'
    received_times: float | None  # received elements in uneven all-to-alls, as a multiple of the mean
    function: str | None
    place: str | None
    calls: str | None


class ExchangeRow(TypedDict):
    """Exchange of the ranks in one step; shares are of the step, without waiting for other ranks."""

    ranks: int
    steps: int
    wrapper: str
    transfer_share: float  # without a few small calls, which are limited by latency
    pairwise_share: float  # mean of the ranks, including waiting
    passes: int
    reduces: int  # all-reduces outside of forward
    early: int  # all-reduces of gradients in passes without a following update
    early_share: float
    small: int  # all-reduces below SMALL_BYTES, per backward pass
    small_bytes: float  # median size of the small ones
    small_share: float
    are_gradients: bool
    marked: int
    search_share: float  # share of host time, without waits for a core
    marks_share: float  # all-reduces of the marks, as their share of the small all-reduces
    unused: int | None


class CollectiveRow(TypedDict):
    """Collectives in one phase of a step that one line of the program calls, or all that average gradients."""

    name: str  # of the one that sends most
    phase: str
    place: str | None
    callee: str | None
    count: int
    size_bytes: int  # sent in a step
    share: float  # of the step, as in `ExchangeRow`
    are_gradients: bool
    is_model_sized: bool  # it sends at least half as many bytes as the parameters have
    option: str | None  # as in `CallRow`
    changed_bytes: int | None  # largest of the steps and ranks


class UnreducedRow(TypedDict):
    """Model in DistributedDataParallel with weights that differ, because the ranks do not average its gradients."""

    model: str
    parameters: int
    ranks: int
    steps: int  # in which the weights of all ranks were compared, and differed
    function: str | None
    place: str | None  # line that calls the model itself with gradients


LOOP_RANKS = Table("loop_ranks", LoopRankRow, "ranks of the loop, per step")
LATE_RANK = Table("late_rank", LateRankRow, "rank that the others wait for")
EXCHANGE = Table("loop_exchange", ExchangeRow, "exchange between the ranks, per step")
COLLECTIVES = Table("loop_collectives", CollectiveRow, "collectives of the ranks by line, per step")
UNREDUCED = Table("unreduced_gradients", UnreducedRow, "models with gradients that the ranks do not average")


@dataclass
class _Step:
    """One step of all ranks."""

    wall_s: float
    reports: Mapping[int, StepReport]
    transfers: list[tuple[CallRow, float]] = field(default_factory=list)  # calls with their transfer times
    waiting_s: Counter[int] = field(default_factory=Counter)
    delay_s: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)

    def more_s(self, rank: int) -> float:
        """Return how much more a rank delays the others than any other rank does."""
        others = (delay_s for other, delay_s in self.delay_s.items() if other != rank)
        return self.delay_s[rank] - max(others, default=0.0)

    def own_s(self, rank: int) -> float:
        """Return the time of a rank's own work: without communication, and without waiting for a core."""
        report = self.reports[rank]
        return max(0.0, _own_s(self, rank, report["phases_s"]) - report["queued_s"])

    def more_work(self, rank: int) -> float:
        """Return by which share a rank's own work exceeds the median of the others."""
        own_s = self.own_s(rank)
        return 1 - median(self.own_s(other) for other in self.reports if other != rank) / own_s if own_s else 0.0

    def transfer_share(self, belongs: Callable[[CallRow], bool]) -> float:
        return sum(time_s for call, time_s in self.transfers if belongs(call)) / self.wall_s


def tables_of(reports: Sequence[RankReport]) -> dict[str, Sequence[Row]]:
    """Return the tables of a job's ranks; empty if fewer than two steps were observed on all of them."""
    by_rank = {one["rank"]: one for one in reports}
    common = set.intersection(*({*one["steps"]} for one in reports)) if reports else set()
    if len(by_rank) < 2 or len(common) < FEWEST:
        return {}
    steps = [_step({rank: one["steps"][number] for rank, one in by_rank.items()}) for number in sorted(common, key=int)]
    steps = [step for step in steps if step.wall_s > 0]
    if len(steps) < FEWEST:
        return {}
    late = _late(by_rank, steps)
    leading = late["rank"] if late else min(by_rank, key=lambda rank: _waiting_s(steps, rank))
    rows: list[LoopRankRow] = [_row(rank, steps, rank == leading) for rank in sorted(by_rank)]
    exchange = _exchange(by_rank, steps)
    made: dict[str, Sequence[Row]] = {**LOOP_RANKS.filled(rows), **EXCHANGE.filled([exchange])}
    collectives = _collectives(by_rank, steps, exchange["are_gradients"])
    made |= COLLECTIVES.filled(collectives) if collectives else {}
    made |= LATE_RANK.filled([late]) if late else {}
    unreduced = [*_unreduced(by_rank)]
    made |= UNREDUCED.filled(unreduced) if unreduced else {}
    own = by_rank[leading]["own_python"]
    return made | (OWN_PYTHON.filled(own) if own else {})


def _unreduced(by_rank: Mapping[int, RankReport]) -> Iterator[UnreducedRow]:
    """Yield a row for each model that each rank trains alone: its weights differ between all ranks in all steps.

    A model is left out if the ranks may exchange its gradients or weights otherwise, such as by averages every few
    steps.
    """
    steps = [step["calls"] for one in by_rank.values() for step in one["steps"].values()]
    sent = max(sum(call["size_bytes"] for call in calls if not call["is_gradients"]) for calls in steps)
    for found in by_rank[min(by_rank)]["replicas"]:
        of = {rank: [each for each in one["replicas"] if _is_same(each, found)] for rank, one in by_rank.items()}
        of = {rank: each for rank, each in of.items() if rank in found["ranks"]}
        if len(of) < max(2, len(found["ranks"])) or any(len(each) != 1 for each in of.values()):
            continue
        digests = [each["steps"] for (each,) in of.values()]
        common = set.intersection(*({*each} for each in digests))
        differ = all(len({each[number] for each in digests}) == len(digests) for number in common)
        if differ and len(common) >= FEWEST_REPLICAS and sent < EXCHANGED * found["size_bytes"]:
            yield {"model": found["model"], "parameters": found["parameters"], "ranks": len(digests),
                   "steps": len(common), "function": found["function"], "place": found["place"]}  # fmt: skip


def _is_same(one: ReplicaReport, other: ReplicaReport) -> bool:
    return (one["model"], one["parameters"], one["ranks"]) == (other["model"], other["parameters"], other["ranks"])


def _step(reports: Mapping[int, StepReport]) -> _Step:
    """Return a step with its collectives matched across the ranks by their order in each process group."""
    step = _Step(max(report["wall_s"] for report in reports.values()), reports)
    of: dict[tuple[str, int], dict[int, CallRow]] = defaultdict(dict)
    for rank, report in reports.items():
        count = Counter[str]()
        for call in report["calls"]:
            if call["name"] not in PAIRWISE:
                of[call["group"], count[call["group"]]][rank] = call
                count[call["group"]] += 1
    for calls in of.values():
        if len(calls) < 2 or {call["ranks"] for call in calls.values()} != {len(calls)}:
            continue
        if len({call["name"] for call in calls.values()}) == 1:
            _add(step, calls)
    return step


def _add(step: _Step, calls: Mapping[int, CallRow]) -> None:
    """Add one collective of a group to a step."""
    least_s, last = min((call["time_s"], rank) for rank, call in calls.items())
    first = calls[min(calls)]  # the ranks may call it at different lines
    changed_bytes = largest(call["changed_bytes"] for call in calls.values())  # one rank alone may write its buffers
    called: CallRow = {**calls[last], "place": first["place"], "callee": first["callee"],
                       "changed_bytes": changed_bytes}  # fmt: skip
    step.transfers.append((called, least_s))
    name = calls[last]["name"]
    if name not in (*TOGETHER, *FROM_ONE):
        return
    (first_s, slow), (second_s, _), *_ = sorted((c["time_s"] + c["queued_s"], rank) for rank, c in calls.items())
    step.delay_s[slow] += second_s - first_s  # type: ignore[assignment]
    if name in FROM_ONE:
        return  # a rank that only sends continues before the others, so that these do not wait all of their time
    for rank, call in calls.items():
        step.waiting_s[rank] += call["time_s"] - least_s  # type: ignore[assignment]
    received = {rank: call["received"] for rank, call in calls.items()}
    if calls[last]["name"] == "all_to_all" and len({*received.values()}) > 1:
        step.received.update(received)


def _waiting_s(steps: Iterable[_Step], rank: int) -> float:
    return median_low(step.waiting_s[rank] for step in steps)


def _own_s(step: _Step, rank: int, phases: Iterable[str]) -> float:
    """Return the time of a rank in some phases without its communication."""
    report, phases = step.reports[rank], {*phases}
    lasted_s = sum(time_s for phase, time_s in report["phases_s"].items() if phase in phases)
    return max(0.0, lasted_s - sum(call["time_s"] for call in report["calls"] if call["phase"] in phases))


def _pairwise_s(step: _Step, rank: int) -> float:
    return sum(call["time_s"] for call in step.reports[rank]["calls"] if call["name"] in PAIRWISE)


def _row(rank: int, steps: Sequence[_Step], leads: bool) -> LoopRankRow:
    return {
        "rank": rank,
        "steps": len(steps),
        "step_s": median_low(step.reports[rank]["wall_s"] for step in steps),
        "waiting_s": _waiting_s(steps, rank),
        "pairwise_s": median_low(_pairwise_s(step, rank) for step in steps),
        "other_s": median_low(_own_s(step, rank, OTHER_PHASES) for step in steps),
        "leads": leads,
    }


def _late(by_rank: Mapping[int, RankReport], steps: Sequence[_Step]) -> LateRankRow | None:
    """Return the rank that delays the others the most, in most of the steps; None if there is none."""
    worst = Counter(max(step.delay_s, key=lambda rank: step.delay_s[rank]) for step in steps if step.delay_s)
    if not worst:
        return None
    ((rank, last),) = worst.most_common(1)
    share = median_low(step.more_s(rank) / step.wall_s for step in steps)
    more_work = median_low(step.more_work(rank) for step in steps)
    if share <= 0 or last < MOSTLY * len(steps) or more_work < EXPLAINS * share:
        return None  # it does not work more: other programs or a slower core delay it
    received = sum((step.received for step in steps), Counter[int]())
    found: LateRankRow = {
        "rank": rank,
        "share": share,
        "last": last,
        "steps": len(steps),
        "work": "",
        "phase": "",
        "extra_share": 0.0,
        "batch_times": None,
        "received_times": received[rank] * len(received) / total if (total := sum(received.values())) else None,
        "function": None,
        "place": None,
        "calls": None,
    }
    return _with_work(found, by_rank, steps)


def _with_work(late: LateRankRow, by_rank: Mapping[int, RankReport], steps: Sequence[_Step]) -> LateRankRow:
    """Return the row with the kind of work in which the last rank takes longer than the median of the others."""
    names = {phase for step in steps for report in step.reports.values() for phase in report["phases_s"]}
    extra = {phase: median(map(_extra(late["rank"], phase), steps)) for phase in names}
    around = {phase: share for phase, share in extra.items() if phase in OTHER_PHASES}
    loading = {phase: share for phase, share in extra.items() if phase == Phase.INPUT}
    computing = {phase: share for phase, share in extra.items() if phase not in (*around, *loading)}
    kinds = {COMPUTE: computing, INPUT: loading, PYTHON: around}
    sums = {work: sum(shares.values()) for work, shares in kinds.items()}
    work = max(sums, key=lambda work: sums[work])
    if sums[work] < EXPLAINS * late["share"]:
        return late
    most = max(kinds[work], key=lambda phase: kinds[work][phase])
    late = {**late, "work": work, "phase": most, "extra_share": sums[work]}
    if work == COMPUTE:
        times = _batch_times(late["rank"], by_rank)
        return {**late, "work": BATCH, "batch_times": times} if is_uneven(times) else late
    line = _own_line(late["rank"], by_rank) if work == PYTHON else None
    return late if line is None else {**late, "function": line["function"], "place": line["place"],
                                      "calls": line["calls"]}  # fmt: skip


def _extra(rank: int, phase: str) -> Callable[[_Step], float]:
    """Return a function from a step to the share by which a rank's phase takes longer than the others'."""

    def share(step: _Step) -> float:
        others = [_own_s(step, other, [phase]) for other in step.reports if other != rank]
        return (_own_s(step, rank, [phase]) - median(others)) / step.wall_s

    return share


def _batch_times(rank: int, by_rank: Mapping[int, RankReport]) -> float | None:
    """Return a rank's batch as a multiple of the median of the others; None if one is unknown."""
    sizes = {each: one["elements"] for each, one in by_rank.items()}
    own, others = sizes.pop(rank), [size for size in sizes.values() if size]
    return own / median(others) if own and len(others) == len(sizes) else None


def _own_line(rank: int, by_rank: Mapping[int, RankReport]) -> OwnPythonRow | None:
    """Return the own function in which a rank spends more time than the median of the others, outside of the phases."""

    def at(one: RankReport) -> dict[tuple[str, str], OwnPythonRow]:
        return {(row["function"], row["place"]): row for row in one["own_python"] if row["phase"] in OTHER_PHASES}

    mine, others = at(by_rank[rank]), [at(one) for each, one in by_rank.items() if each != rank]
    extra = {
        place: row["time_s"] - median(other[place]["time_s"] if place in other else 0.0 for other in others)
        for place, row in mine.items()
        if row["place"]
    }
    return mine[max(extra, key=lambda place: extra[place])] if extra else None


def _exchange(by_rank: Mapping[int, RankReport], steps: Sequence[_Step]) -> ExchangeRow:
    """Return the exchange between the ranks in a step, and which part of it could be avoided."""
    first = by_rank[min(by_rank)]
    calls = steps[-1].reports[first["rank"]]["calls"]
    passes = steps[-1].reports[first["rank"]]["passes"]
    within = _phases_of_layers(calls)
    reduces = [call for call in calls if call["name"] == "all_reduce" and not call["is_gradients"]]
    own = [call for call in reduces if call["phase"] not in within]
    buckets = first["bucket_bytes"]
    by_ddp = sum(call["is_gradients"] for call in calls)
    sent = buckets or [call["size_bytes"] for call in own if call["size_bytes"]]
    small = [size for size in sent if size < SMALL_BYTES]
    are_small = bool(first["marked"] and buckets) and len(small) == len(buckets)
    many_small = sum(0 < call["size_bytes"] < SMALL_BYTES for call in calls) + by_ddp * len(small) >= MANY_SMALL
    least = HALF * first["parameter_bytes"]
    are_gradients = bool(buckets) or sum(sent) >= least > 0
    early = [call for call in (calls if buckets else own) if call["is_early"] and call["name"] == "all_reduce"]
    are_early = are_gradients and sum(call["size_bytes"] for call in early) >= least > 0

    def is_reduce(call: CallRow) -> bool:
        return call["is_gradients"] if buckets else call["name"] == "all_reduce" and call["phase"] not in within

    def is_small(call: CallRow) -> bool:
        return is_reduce(call) and (call["is_gradients"] or call["size_bytes"] < SMALL_BYTES)

    def share(belongs: Callable[[CallRow], bool]) -> float:
        return _share(steps, belongs)

    return {
        "ranks": len(by_rank),
        "steps": len(steps),
        "wrapper": first["wrapper"],
        "transfer_share": share(lambda call: many_small or call["size_bytes"] >= SMALL_BYTES),
        "pairwise_share": median_low(mean(_pairwise_s(step, r) for r in by_rank) / step.wall_s for step in steps),
        "passes": passes,
        "reduces": by_ddp * len(buckets) if buckets else len(own),
        "early": (sum(call["is_gradients"] for call in early) * len(buckets) if buckets else len(early)) * are_early,
        "early_share": share(lambda call: is_reduce(call) and call["is_early"]) if are_early else 0.0,
        "small": len(small) if buckets else round(len(small) / max(1, passes)),
        "small_bytes": float(median(small)) if small else 0.0,
        "small_share": share(is_small) if 2 * len(small) >= len(sent) else 0.0,
        "are_gradients": are_gradients,
        "marked": first["marked"],
        "marks_share": share(lambda call: call["is_gradients"]) / (len(buckets) + 1) if are_small else 0.0,
        "search_share": min(_search_share(steps, one) for one in by_rank.values()),
        "unused": largest(one["unused"] for one in by_rank.values()),
    }


def _collectives(by_rank: Mapping[int, RankReport], steps: Sequence[_Step], are_gradients: bool) -> list[CollectiveRow]:
    """Return the collectives of a step by line, those with the largest share first."""
    first = by_rank[min(by_rank)]
    within = _phases_of_layers(steps[-1].reports[first["rank"]]["calls"])
    are_averaged = are_gradients and not first["bucket_bytes"]
    least = HALF * first["parameter_bytes"]

    def carries_gradients(call: CallRow) -> bool:
        return call["is_gradients"] or (are_averaged and call["name"] == "all_reduce" and call["phase"] not in within)

    def key(call: CallRow) -> Hashable:
        if carries_gradients(call):
            return "gradients"
        return call["place"], call["phase"], call["option"]

    def row(of: Hashable) -> CollectiveRow:
        calls = [call for step in steps for call, _ in step.transfers if key(call) == of]
        in_last = [call for call, _ in steps[-1].transfers if key(call) == of]
        most = max(calls, key=lambda call: call["size_bytes"])
        size_bytes = sum(call["size_bytes"] for call in in_last)
        return {
            "name": most["name"],
            "phase": most["phase"],
            "place": most["place"],
            "callee": most["callee"],
            "count": len(in_last),
            "size_bytes": size_bytes,
            "share": _share(steps, lambda call: key(call) == of),
            "are_gradients": carries_gradients(most),
            "is_model_sized": size_bytes >= least > 0,
            "option": most["option"],
            "changed_bytes": largest(call["changed_bytes"] for call in calls),
        }

    rows = [row(of) for of in dict.fromkeys(key(call) for call, _ in steps[-1].transfers)]
    return sorted(rows, key=lambda each: -each["share"])[:MOST_COLLECTIVES]


def _phases_of_layers(calls: Iterable[CallRow]) -> tuple[str, ...]:
    """Return the phases in which all-reduces belong to the layers of the model, and carry no gradients of weights."""
    reduces = [call for call in calls if call["name"] == "all_reduce" and not call["is_gradients"]]
    divides_layers = any(call["phase"] in (Phase.FORWARD, Phase.LOSS) for call in reduces)
    return MODEL_PHASES if divides_layers else (Phase.FORWARD, Phase.LOSS)


def _share(steps: Sequence[_Step], belongs: Callable[[CallRow], bool]) -> float:
    """Return the share of the step that the transfers of some calls take."""
    return sorted(step.transfer_share(belongs) for step in steps)[len(steps) // 4]


def _search_share(steps: Iterable[_Step], one: RankReport) -> float:
    """Return the share of a rank's step spent in the search, and in marking the parameters that it needs.

    The step excludes waits for other ranks and for a core.
    """
    if not one["marked"]:
        return 0.0
    shares = []
    for step in steps:
        report = step.reports[one["rank"]]
        search_s = one["marking_s"] + report["search_s"]
        work_s = max(map(step.own_s, step.reports)) + sum(time_s for _, time_s in step.transfers)
        shares.append(search_s / max(min(work_s, report["wall_s"] - report["queued_s"]), search_s))
    return median_low(shares)
