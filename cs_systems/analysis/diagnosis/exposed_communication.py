"""Rule for exposed communication: collectives or calls of MPI run while nothing is computed.

A rank that waits for another one runs its collective meanwhile. Only the traces of all ranks separate this waiting from
the transfer; remedies for the transfer do not shorten it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from cs_systems.analysis.attribution.distribution import DDP, FSDP, Distribution
from cs_systems.analysis.attribution.gaps import idle_during
from cs_systems.analysis.attribution.kernel_families import is_collective
from cs_systems.analysis.attribution.overlap import RANK_OVERLAP, Intervals, intersection, union
from cs_systems.analysis.comparison.loop_findings import OTHER_PHASES
from cs_systems.analysis.comparison.loop_ranks import (
    COLLECTIVES,
    EXCHANGE,
    MANY_SMALL,
    SMALL_BYTES,
    CollectiveRow,
    ExchangeRow,
)
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.own_python import called_at
from cs_systems.config import Phase
from cs_systems.core import plugins
from cs_systems.core.statistics import quantile
from cs_systems.core.tables import Row
from cs_systems.core.units import counted, human
from cs_systems.formulas.rank_layout import options_of, overlaps, splits_of
from cs_systems.readers.forms.columns import UNKNOWN, Ints, Ranges
from cs_systems.readers.forms.jobs import PAIRWISE
from cs_systems.readers.forms.operators import nested
from cs_systems.readers.forms.trace import Kernels, steps_of

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.analysis.comparison.ranks import Merged

OVERLAP = "overlap it with backward (DistributedDataParallel, FSDP; --strategy ddp_bucketed, or fsdp)"
BUCKETS = "send the gradients in buckets (--strategy ddp_bucketed)"
SIZES = "try other bucket sizes (--bucket-size-mb)"
ASK = "analyze the traces of all ranks together: one rank's trace does not tell waiting from transfer"
COMMAND = "cs-systems analyze RANK0 RANK1 … --ranks"
MOSTLY = 0.5  # share of the transfer
NOTABLE = 0.1  # share of a loop's step; on a busy machine, gloo's threads take some of it
ALONE_BESIDE = "without computation beside it"
ALONE = f"communication {ALONE_BESIDE}"
WAITED = ", waiting for other ranks included"
BATCH = "use a larger batch for each rank"
# wrapper of the program → possible changes, for a foreign trace
OF_WRAPPER = {
    DDP: ("send the gradients in bf16 (bf16_compress_hook)", "try other bucket sizes (bucket_cap_mb)"),
    FSDP: ("gather and reduce in bf16 (MixedPrecisionPolicy)", "prefetch more blocks ahead"),
}
OF_LOOP = ("overlap it with backward (DistributedDataParallel, FSDP)", "send bf16")
# ways for collectives outside of the model's phases
OTHERS = "send less there, or only in every n-th step"
OF_OTHERS = {
    "broadcast": "send it once, or only when it has changed",
    "all_gather": "reduce it on each rank before, or send it only in every n-th step",
}
# parameters: each rank may have updated some of them, and the others need these
OF_PARAMETERS = {
    "broadcast": "send it only before the loop if each rank updates all parameters itself, "
    "else overlap it with computation",
}
OF_SOLVER = "send what other ranks need first, from a stream of its own, and compute the rest meanwhile"
OF_MPI = (
    "send device memory between GPUs directly (NCCL, or an MPI that is aware of CUDA), in fewer messages, and compute "
    "meanwhile what no other rank needs"
)
MPI = "MPI_"
HOST_LATE = ("launch-bound", "host-time", "host-synchronisation", "blocking-copies", "device-allocation")
MOST_NAMED = 2
OF_INFERENCE = ("keep the ranks that divide a layer in one host", "send bf16")


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the exposed time of the worst rank or device; without a trace, the communication after backward.

    A profiler lengthens the exposed time as well as the step, so its share of the traced step is applied to the step
    without a profiler; the sentence names both. If the transfer is known, only the transfer counts, because the rest is
    waiting. A profiler that lengthens only the host's work makes this share too small. So the communication after
    backward, measured without a profiler, counts if it is longer.
    """
    step_s = evidence.step_s
    if step_s is None or evidence.setting("world_size") == 1:
        return None
    if evidence.job is not None:
        return _of_job(evidence, evidence.job)
    if ranks := EXCHANGE.of(evidence.tables):
        return _of_loop(ranks[0], COLLECTIVES.of(evidence.tables), step_s)
    if evidence.config is None and evidence.distribution is not None:
        return _of_one_rank(evidence, evidence.distribution, step_s)
    usual = evidence.usual
    if usual is not None and evidence.tables and (found := _of_mpi(usual.profile, step_s)) is not None:
        return found
    rows: list[Row] = list(RANK_OVERLAP.of(evidence.tables))
    left_s = min(step_s, evidence.phase_s(Phase.SYNCHRONIZE) or 0.0)
    waits = any(row.get("transfer_s") is None for row in rows)
    if rows:
        worst = max(rows, key=_share)
        share, of = _share(worst), _traced(worst)
    else:
        worst, share = {"phase": Phase.SYNCHRONIZE.value, "median_s": left_s}, left_s / step_s
        of = "step"
    if not share:
        return None
    waited = WAITED if waits else ", waiting for other ranks left out" if rows else ""
    cause = f"{share:.0%} of the {of} is {ALONE}{waited}"
    strategy = str(evidence.setting("strategy"))
    options = {"strategy": strategies} if (strategies := _strategies(strategy)) else {}
    # fewer collectives also save launches of the host, so the exposed time is not a bound for such remedies
    takes = max(step_s * share, left_s)
    at_best = None if strategies and _more_overlap(strategy) == BUCKETS else _fastest_s(evidence, step_s) - takes
    return Diagnosis(cause, _remedy(evidence), step_s, at_best, evidence=(worst,), takes=takes, options=options)


def _fastest_s(evidence: Evidence, step_s: float) -> float:
    """Return the duration of the fastest usual steps, which a bound must hold for where the host's speed varies."""
    measured = evidence.measurement
    return min(step_s, quantile(measured.durations_s("step"), 0.1)) if measured and measured.timed else step_s


def _of_loop(row: ExchangeRow, collectives: Sequence[CollectiveRow], step_s: float) -> Diagnosis | None:
    """Find the transfer in a loop, without sends and receives between two ranks, and the line with most of it."""
    share = row["transfer_share"]
    if share < NOTABLE:
        return None
    cause = f"{share:.0%} of the step is transfer between ranks {ALONE_BESIDE}"
    most = _most(collectives, share)
    if most is None:
        remedy = _joined([*OF_WRAPPER.get(row["wrapper"], OF_LOOP), BATCH])
        return Diagnosis(cause, remedy, step_s, step_s * (1 - share), evidence=(row,))
    of_most, size = min(share, most["share"]), human(most["size_bytes"], "bytes")
    callee = most["callee"] if most["option"] is None else None  # the call of a model sends its buffers
    place = f" at {called_at(None, most['place'], callee)}" if most["place"] else ""
    part = "all of it" if of_most == share else f"{of_most:.0%}"
    if most["option"] is None:
        sent = f"in {counted(most['count'], 'call')} of {most['name']} ({size}){place}"
        remedy = _of_others(most)
    else:
        sent = f"for the buffers ({size}) that {DDP} sends from rank 0 before each forward{place}"
        remedy = _of_buffers(most, row["steps"])
    return Diagnosis(f"{cause}, {part} {sent}", remedy, step_s, step_s * (1 - of_most), evidence=(row, most))


def _most(collectives: Sequence[CollectiveRow], share: float) -> CollectiveRow | None:
    """Return the line with most of the transfer, if it sends buffers or is outside of the model's phases and updates.

    Buffers come first from a notable share, because nothing else needs to change for them.
    """
    large = [one for one in collectives if _is_large(one)]
    sent = [one for one in large if one["option"] is not None and one["share"] >= NOTABLE]
    most = max(sent or large, key=lambda one: one["share"], default=None)
    if most is None or sent:
        return most
    is_outside = most["phase"] in OTHER_PHASES and most["place"] is not None and _of_others(most) != ""
    is_named = is_outside or most["option"] is not None
    return most if is_named and most["share"] >= MOSTLY * share else None


def _is_large(row: CollectiveRow) -> bool:
    """Return whether more than the latency of a few calls takes the time."""
    return row["count"] >= MANY_SMALL or row["size_bytes"] >= row["count"] * SMALL_BYTES > 0


def _of_others(row: CollectiveRow) -> str:
    """Return how to send less of other data than buffers, or "" for gradients and for parts of all parameters."""
    if row["are_gradients"]:
        return ""
    return OF_PARAMETERS.get(row["name"], "") if row["is_model_sized"] else OF_OTHERS.get(row["name"], OTHERS)


def _of_buffers(row: CollectiveRow, steps: int) -> str:
    """Return how to send no buffers; other steps, and writes that raise no version, may change them unseen."""
    unchanged = f" (no change was seen in {counted(steps, 'step')})" if row["changed_bytes"] == 0 else ""
    return f"pass {row['option']}=False, if each rank may keep its own{unchanged}"


def _of_one_rank(evidence: Evidence, found: Distribution, step_s: float) -> Diagnosis:
    """Find the exposed time of the only known rank, which may include waiting.

    Sends and receives of a program with PyTorch belong to a pipeline.
    """
    is_solver = not evidence.uses_torch
    exposed_s = found.exposed_s(call for call in found.calls if is_solver or call.name not in PAIRWISE)
    times = f"{human(exposed_s, 's')} of {human(step_s, 's')}"
    cause = f"{exposed_s / step_s:.0%} of the traced step ({times}) is {ALONE}{WAITED}"
    if is_solver:
        if all(call.name in PAIRWISE for call in found.calls):
            return Diagnosis(cause, OF_SOLVER, step_s, step_s - exposed_s)
        return Diagnosis(cause, f"{OF_SOLVER}; {ASK}", step_s, step_s - exposed_s, try_it=COMMAND)
    return Diagnosis(cause, ASK, step_s, step_s - exposed_s, try_it=COMMAND)


def _of_mpi(profile: Profile, step_s: float) -> Diagnosis | None:
    """Find the time without a kernel in calls of MPI, which nsys records as ranges, of the threads that compute."""
    trace, steps = profile.trace, profile.steps
    kernels = trace.kernels.take(np.isin(trace.kernels.device, profile.devices))
    of_steps = Intervals(np.array([step.start_s for step in steps]), np.array([step.end_s for step in steps]))
    calls = trace.ranges.take(np.isin(trace.ranges.thread, _computing_threads(kernels)))
    calls = calls.take(calls.name.codes_where(lambda name: name.startswith(MPI)))
    begun = np.searchsorted(of_steps.start_s, calls.end_s, "left")
    calls = calls.take(np.searchsorted(of_steps.end_s, calls.start_s, "right") < begun)
    if not len(calls):
        return None
    inside = intersection(union(calls.start_s, calls.end_s), of_steps)
    calls = _innermost(calls)
    # one call for both: each sums up all kernels
    starts, ends = (np.concatenate(each) for each in zip(inside, (calls.start_s, calls.end_s), strict=True))
    idle_s = idle_during(kernels, starts, ends)
    exposed_s = min(step_s, float(idle_s[: len(inside.start_s)].sum()) / len(steps))
    if not exposed_s:
        return None
    times = np.bincount(calls.name.codes, idle_s[len(inside.start_s) :], len(calls.name.values))
    most = [calls.name.values[code] for code in np.argsort(-times, kind="stable")[:MOST_NAMED] if times[code]]
    count = np.count_nonzero(steps_of(calls.start_s, steps)[1])
    of_mpi = counted(max(1, round(count / len(steps))), "call")
    cause = f"{exposed_s / step_s:.0%} of the step no kernel runs during {of_mpi} of MPI ({', '.join(most)}){WAITED}"
    return Diagnosis(cause, OF_MPI, step_s, step_s - exposed_s, refines=HOST_LATE)


def _computing_threads(kernels: Kernels) -> Ints:
    """Return the threads that launch many of the kernels; a library's thread may launch collectives and copies."""
    computes = (kernels.thread != UNKNOWN) & ~is_collective(kernels)
    threads, counts = np.unique(kernels.thread[computes], return_counts=True)
    return np.asarray(threads[counts >= NOTABLE * counts.max(initial=0)])


def _innermost(calls: Ranges) -> Ranges:
    """Return the ranges without another one inside: a program may mark several calls with a range of its own."""
    calls = calls.take(np.lexsort((-calls.end_s, calls.start_s, calls.thread)))
    outer, _ = nested(calls.start_s, calls.end_s, calls.thread)
    return calls.take(~np.isin(np.arange(len(outer)), outer))


def _of_job(evidence: Evidence, job: Merged) -> Diagnosis | None:
    """Find the transfer of the rank that waits the least, without sends and receives between two ranks."""
    from cs_systems.analysis.comparison.ranks import leading, rank_rows  # few steps have the traces of all ranks

    one = leading(job)
    times, found = job.times_of(one), evidence.distribution
    if times is None or not job.step_s:
        return None
    left_s = max(0.0, times.exposed_transfer_s - (found.exposed_s(found.in_pairs) if found else 0.0))
    share = left_s / job.step_s
    cause = (
        f"{share:.0%} of the traced step ({human(left_s, 's')} of {human(job.step_s, 's')}) is transfer between ranks "
        f"{ALONE_BESIDE}"
    )
    rows = tuple(cast(Row, row) for row in rank_rows(job))
    return Diagnosis(
        cause, _remedy(evidence), job.step_s, job.step_s - left_s, evidence=rows, subject=f"rank {one.rank}"
    )


def _remedy(evidence: Evidence) -> str:
    """Return changes to try, without those that the program is known to make already."""
    found = evidence.distribution
    if evidence.config is None and found is not None and (found.wrapper or not found.has_backward):
        return _joined([*OF_WRAPPER.get(found.wrapper, OF_INFERENCE), BATCH])
    options = evidence.config.strategy_options if evidence.config is not None else {}
    sends_bf16 = "bf16" in (options.get("comm_dtype"), options.get("compute_dtype"))
    ways = [_more_overlap(str(evidence.setting("strategy"))), "" if sends_bf16 else "send bf16", BATCH]
    return _joined([way for way in ways if way])


def _joined(ways: Sequence[str]) -> str:
    *others, last = ways
    return f"{', '.join(others)}, or {last}" if others else last


def _strategies(strategy: str) -> list[str]:
    """Return the strategies that carry out the advice of `_more_overlap`, if it names another strategy."""
    way = _more_overlap(strategy)
    overlapping = [name for name in plugins.names("parallel") if overlaps(name)]
    if way == OVERLAP:
        return overlapping
    return [name for name in overlapping if "bucket_size_mb" in options_of(name)] if way == BUCKETS else []


def _more_overlap(strategy: str) -> str:
    """Return an option that lets the strategy overlap more with backward, or "" if there is none."""
    if plugins.is_foreign(strategy):
        return ""
    is_known = all(name in plugins.names("parallel") for name in strategy.split("+"))
    if not is_known or not overlaps(strategy):
        return OVERLAP
    if "bucket_size_mb" in options_of(strategy):
        return SIZES
    return "" if "parameters" in splits_of(strategy) else BUCKETS  # parameters are gathered block by block


def _share(row: Row) -> float:
    """Return the exposed communication of a rank or device, at most its transfer, as a share of the traced step."""
    if not row.get("step_s"):
        return float(row.get("share") or 0.0)
    transfer_s = row.get("transfer_s")
    exposed_s = float(row["exposed_s"] if transfer_s is None else min(row["exposed_s"], transfer_s))
    return exposed_s / float(row["step_s"])


def _traced(row: Row) -> str:
    """Return the name of the step that `_share` refers to, with both times if the row has them."""
    if not row.get("step_s"):
        return "traced step"
    return f"traced step ({human(_share(row) * row['step_s'], 's')} of {human(row['step_s'], 's')})"


RULE = Rule(find)
