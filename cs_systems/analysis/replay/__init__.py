"""Replay of recorded steps: what they would take after a change, by the dependencies of their recorded work.

`replayed(profile)` builds the graph of the steps (`graph.py`) and replays it (`run.py`). If it does not give the
recorded steps again, or too much of their time is unexplained, no change is predicted: `Replay.why_not` says why. Else
`Replay.what_if(LaunchesFree())` returns the expected duration of a step with a range, or a refusal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from cs_systems.analysis.replay.changes import (
    LONG_S,
    Change,
    CopiesOverlapped,
    FamilyScaled,
    HostScaled,
    InputRemoved,
    LaunchesFree,
    Refusal,
    Subject,
    SyncRemoved,
)
from cs_systems.analysis.replay.clean import Clean, by_clean, by_usual
from cs_systems.analysis.replay.graph import USUAL, Costs, Graph, graph, with_quartiles
from cs_systems.analysis.replay.recorded import recorded
from cs_systems.analysis.replay.run import Times, repeated, replay, step_times, total, twice_costs
from cs_systems.core.tracers import tracer
from cs_systems.core.units import counted, human
from cs_systems.readers.forms.columns import UNKNOWN, Floats
from cs_systems.readers.forms.trace import Step, Trace

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile

__all__ = [
    "Change", "Clean", "CopiesOverlapped", "Expected", "FamilyScaled", "HostScaled", "InputRemoved", "LaunchesFree",
    "Refusal", "Replay", "SyncRemoved", "replayed",
]  # fmt: skip

MOST_UNEXPLAINED = 0.02  # share of the time from the first step's start to the last one's end
MOST_ERROR = 0.05  # share of a step
MOST_LOST = 0.02  # share of the activities without a recorded launch
MOST_ACTIVITIES = 50_000  # replayed: of more, the first steps; at least one
RECURS = 0.75  # share of the steps
MOST_COLD = 0.05  # share of the steps' time spent in the first launches of kernels
COLD_S = 1e-3  # longer than any launch of a kernel that is loaded
LEAST_CHANGE = 0.01  # share of a step
FEWEST = 5  # activities of a step


@dataclass(frozen=True)
class Expected:
    """Duration of a step that is expected after a change, with a range, in s.

    now: before it; is_estimated: this and the others are without the usual slowdown by the profiler. notes: what the
    numbers rest on.
    """

    value: float
    low: float
    high: float
    now: float
    notes: tuple[str, ...] = ()
    is_estimated: bool = False
    how: Literal["replayed"] = "replayed"

    @property
    def share(self) -> float:
        """Share of the step that the change saves."""
        return 1 - self.value / self.now


class Ratios(NamedTuple):
    """Ratio of a step's duration after a change to before it, its range over the steps, and the duration before."""

    ratio: float
    low: float
    high: float
    before_s: float


World = tuple[Costs, ...]  # costs to start from, of each part


@dataclass(frozen=True)
class Part:
    """Consecutive steps with their graph."""

    steps: tuple[Step, ...]
    graph: Graph

    @cached_property
    def recorded_s(self) -> Floats:
        """Time of each step on host and GPU, as recorded."""
        return step_times(self.graph, Times.recorded(self.graph.recorded))

    @cached_property
    def times(self) -> Times:
        return replay(self.graph)

    @cached_property
    def replayed_s(self) -> Floats:
        """Time of each step on host and GPU, as replayed."""
        return step_times(self.graph, self.times)

    @cached_property
    def kernels_s(self) -> Floats:
        """Time of each step in which one of its own kernels ran, as recorded."""
        r = self.graph.recorded
        own = r.kind.codes_where(lambda kind: kind == "kernel") & self.graph.launched & ~r.lost
        order = np.argsort(r.begin_s[own], kind="stable")
        begin_s, done_s = r.begin_s[own][order], r.done_s[own][order]
        reached_s = np.maximum.accumulate(np.append(-np.inf, done_s[:-1])) if len(done_s) else done_s
        busy_s = np.clip(done_s - np.maximum(begin_s, reached_s), 0.0, None)
        step = np.searchsorted(r.marks[:, 0], r.call[own][order]) - 1
        found_s = np.zeros(len(r.marks))
        np.add.at(found_s, step, busy_s)
        return found_s

    @cached_property
    def twice(self) -> Graph:
        return repeated(self.graph)

    @cached_property
    def quartiles(self) -> list[Costs]:
        """Costs with the constants at their quartiles."""
        return with_quartiles(self.graph)

    @cached_property
    def _known(self) -> dict[int, tuple[Costs, Floats]]:
        return {}

    def repeated_s(self, graph: Graph, costs: Costs) -> Floats:
        """Return the duration of each step in s, if all steps run twice in a row, as in a loop."""
        twice = self.twice if graph is self.graph else repeated(graph)
        return step_times(twice, replay(twice, twice_costs(graph, costs)))[len(self.steps) :]

    def unchanged_s(self, costs: Costs) -> Floats:
        """Return the durations before a change, and keep them for the next change."""
        if id(costs) not in self._known:
            self._known[id(costs)] = costs, self.repeated_s(self.graph, costs)
        return self._known[id(costs)][1]


@dataclass(frozen=True)
class Replay:
    """Steps that were replayed.

    why_not: why no change can be predicted, in one sentence; None if changes can be.
    """

    trace: Trace
    parts: tuple[Part, ...]
    why_not: str | None

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for part in self.parts for step in part.steps)

    @cached_property
    def recorded_s(self) -> Floats:
        """Duration of each step as recorded."""
        return np.concatenate([part.recorded_s.max(axis=1) for part in self.parts]) if self.parts else np.empty(0)

    @property
    def step_s(self) -> float:
        """Duration of a step as recorded, the mean."""
        return self._mean([part.recorded_s for part in self.parts])

    @cached_property
    def replayed_step_s(self) -> float:
        """Duration of a step as replayed, the mean."""
        return self._mean([part.replayed_s for part in self.parts])

    def _mean(self, parts: Sequence[Floats]) -> float:
        return sum(map(total, parts)) / len(self.steps) if parts else math.nan

    @property
    def error(self) -> float:
        """Difference of the replayed from the recorded duration, as a share; NaN without a replay."""
        return abs(self.replayed_step_s / self.step_s - 1) if self.parts else math.nan

    @property
    def unexplained(self) -> float:
        """Share of the steps' time in delays that no edge explains."""
        delays_s = sum(part.graph.unexplained_s for part in self.parts)
        return delays_s / (self.step_s * len(self.steps)) if self.parts else math.nan

    @cached_property
    def spread(self) -> float:
        """Spread between the recorded steps, from the first to the third quartile, as a share of the median."""
        low, middle, high = np.quantile(self.recorded_s, [0.25, 0.5, 0.75]).tolist()
        return float((high - low) / middle)

    def what_if(self, *changes: Change, clean: Clean | None = None) -> Expected | Refusal:
        """Return the expected duration of a step after all of these changes together, or why it cannot be told.

        clean: a step of the same program without a profiler. Without one, the usual slowdown of the host by the
            profiler is taken out of the step before and after the change, and the range reaches to the answer with the
            host as recorded.
        """
        if self.why_not:
            return Refusal(self.why_not)
        worlds, notes = self._worlds(clean)
        if not self._long_recurs:
            changes = tuple(change.loosely if isinstance(change, LaunchesFree) else change for change in changes)
        answers = [self._ratios(changes, world) for world in worlds]
        if loosely := [change.loosely for change in changes if isinstance(change, LaunchesFree) and change.keeps_long]:
            others = [change for change in changes if not isinstance(change, LaunchesFree)]
            answers.insert(0, self._ratios([*others, *loosely], worlds[-1]))
        for answer in answers:
            if isinstance(answer, Refusal):
                return answer
        found = [answer for answer in answers if not isinstance(answer, Refusal)]
        best, off = found[-1], self.unexplained + self.error + self._by_constants(changes)
        if clean:
            off += abs(best.before_s / clean.step_s - 1)
        is_estimated = clean is None and len(worlds) > 1  # the unchanged step, too, without the profiler
        scales = [answer.before_s if is_estimated else clean.step_s if clean else self.step_s for answer in found]
        low = min(scale * (min(answer.ratio, answer.low) - off) for answer, scale in zip(found, scales, strict=True))
        high = max(scale * (max(answer.ratio, answer.high) + off) for answer, scale in zip(found, scales, strict=True))
        now = scales[-1]
        if loosely and found[0].ratio < best.ratio - LEAST_CHANGE:
            without = human(now * found[0].ratio, "s")
            notes = (*notes, f"the host's stretches over {human(LONG_S, 's')} stay; without them {without}")
        expected = Expected(now * best.ratio, max(low, 0.0), high, now, (*notes, *self._notes()), is_estimated)
        if abs(expected.share) < self.spread:
            return Refusal(
                f"it changes the step by {abs(expected.share):.1%}, less than the {self.spread:.1%} by which the "
                f"{len(self.recorded_s)} steps differ; measure it",
                expected.share,
            )
        return expected

    @cached_property
    def _long_recurs(self) -> bool:
        """Flag for a long stretch of the host in most steps; in a few it is a stall that the program does not cause."""
        steps = having = 0
        for part in self.parts:
            for begins, ends in part.graph.recorded.marks.tolist():
                steps += 1
                having += bool((part.graph.costs.segment[begins + 1 : ends + 1] > LONG_S).any())
        return having > RECURS * steps

    @cached_property
    def _usual(self) -> World:
        """Costs without the usual slowdown of the host by the profiler; as recorded if that is not known."""
        inflation = tracer(self.trace.profiler).inflation
        recorded = [self._subject(part, part.graph.costs) for part in self.parts]
        return tuple(by_usual(one, inflation) if inflation else one.costs for one in recorded)

    def _worlds(self, clean: Clean | None) -> tuple[list[World], tuple[str, ...]]:
        """Return the costs to start from, the best last, and notes about them."""
        recorded = tuple(part.graph.costs for part in self.parts)
        if clean:
            return [tuple(by_clean(self._subject(part, part.graph.costs), clean) for part in self.parts)], ()
        if inflation := tracer(self.trace.profiler).inflation:
            note = (
                f"the usual slowdown by {self.trace.profiler}, about {inflation.per_launch_s * 1e6:.0f} µs per kernel, "
                "is taken out; the range includes the host as recorded"
            )
            return [recorded, self._usual], (note,)
        return [recorded], ()

    def _subject(self, part: Part, costs: Costs) -> Subject:
        return Subject(self.trace, part.graph, costs, part.steps[0].start_s)

    def _ratios(self, changes: Sequence[Change], world: World) -> Ratios | Refusal:
        """Return how the changes scale the steps of all parts."""
        before, after = list[Floats](), list[Floats]()
        for part, costs in zip(self.parts, world, strict=True):
            answer = self._changed_s(part, costs, changes)
            if isinstance(answer, Refusal):
                return answer
            before.append(part.unchanged_s(costs))
            after.append(answer)
        before_s, after_s = sum(map(total, before)), sum(map(total, after))
        of_steps = np.concatenate(after).max(axis=1) / np.concatenate(before).max(axis=1)
        low, high = np.quantile(of_steps, [0.1, 0.9]).tolist()
        return Ratios(after_s / before_s, low, high, before_s / len(self.steps))

    def _changed_s(self, part: Part, costs: Costs, changes: Sequence[Change]) -> Floats | Refusal:
        """Return the durations of a part's steps in a loop after the changes."""
        subject = self._subject(part, costs)
        for change in changes:
            answer = change.apply(subject)
            if isinstance(answer, Refusal):
                return answer
            subject = answer
        steps_s = part.repeated_s(subject.graph, subject.costs)
        is_free = any(isinstance(change, LaunchesFree) for change in changes)
        lasts_as_before = np.array_equal(subject.costs.duration, part.graph.costs.duration)
        # Kernels of streams that took turns may need the whole device, although only the host ordered them.
        if is_free and lasts_as_before and steps_s[:, 1].sum() < part.kernels_s.sum():
            steps_s[:, 1] = part.kernels_s
        return steps_s

    def _by_constants(self, changes: Sequence[Change]) -> float:
        """Return by how much the ratio of after to before moves with the constants at their quartiles."""
        part, ratios = self.parts[0], list[float]()
        for costs in (part.graph.costs, *part.quartiles):
            after = self._changed_s(part, costs, changes)
            if not isinstance(after, Refusal):
                ratios.append(total(after) / total(part.unchanged_s(costs)))
        return max(abs(other - ratios[0]) for other in ratios)

    def _notes(self) -> tuple[str, ...]:
        guessed = sum(part.graph.waits.guessed for part in self.parts)
        notes = [f"{counted(guessed, 'wait')} between streams guessed by the times"] if guessed else []
        if any("collective" in part.graph.recorded.families[0] for part in self.parts):
            notes.append("collectives last as recorded on this rank, their waits for other ranks included")
        return tuple(notes)


def replayed(of: Profile | Trace, steps: Sequence[Step] | None = None) -> Replay:
    """Return the replay of steps of a trace, of a profile by default all of them.

    Of more than MOST_ACTIVITIES kernels and copies, the first steps are replayed, and at least one.
    """
    trace = of if isinstance(of, Trace) else of.trace
    if steps is None:
        if isinstance(of, Trace):
            raise TypeError("a trace has no steps: give them")
        steps = of.steps
    if reason := _why_no_graph(trace, steps):
        return Replay(trace, (), reason)
    constants, parts = USUAL, dict[int, Part]()
    runs = _runs(_few(trace, steps))
    for number in sorted(range(len(runs)), key=lambda n: -len(runs[n])):  # the longest has the most cases
        made = graph(trace, recorded(trace, runs[number]), constants)
        parts[number], constants = Part(runs[number], made), made.constants
    replay = Replay(trace, tuple(parts[number] for number in range(len(runs))), None)
    return replace(replay, why_not=_why_not(replay))


def _why_no_graph(trace: Trace, steps: Sequence[Step]) -> str | None:
    if not len(trace.kernels):
        return "the trace holds no kernel, so nothing can be replayed"
    if not len(trace.calls) or bool((trace.kernels.call == UNKNOWN).all()):
        return "the trace holds no launch of a kernel, so what the GPU waited for is unknown"
    if trace.lacks_kernels:
        return "the GPU ran kernels that the trace does not hold, so its idle time is unknown"
    return None


def _why_not(replay: Replay) -> str | None:
    """Return why a replay is not fit for predictions."""
    trace, graphs = replay.trace, [part.graph for part in replay.parts]
    missing = sum(((trace.lost_launches >= s.start_s) & (trace.lost_launches < s.end_s)).sum() for s in replay.steps)
    if missing:
        return f"{counted(int(missing), 'launched kernel')} of the steps are missing in the trace"
    count = sum(int(one.launched.sum()) for one in graphs)
    if count < FEWEST * len(replay.steps):
        return f"the steps have only {counted(count, 'kernel or copy', 'kernels and copies')}"
    lost = sum(int(one.recorded.lost.sum()) for one in graphs) / count
    if lost > MOST_LOST:
        return f"{lost:.0%} of the kernels have no recorded launch"
    if (cold_s := sum(map(_cold_s, graphs))) > MOST_COLD * replay.step_s * len(replay.steps):
        return (
            f"{human(cold_s, 's')} of the steps pass in the first launches of kernels, which load their code; choose "
            "steps after a warm-up"
        )
    if replay.unexplained > MOST_UNEXPLAINED:
        return (
            f"{replay.unexplained:.1%} of the step passes in delays that the trace does not explain; at most "
            f"{MOST_UNEXPLAINED:.0%} allow a prediction"
        )
    if replay.error > MOST_ERROR:
        return (
            f"the replay of the unchanged step is off by {replay.error:.1%}; at most {MOST_ERROR:.0%} allow a "
            "prediction"
        )
    return None


def _cold_s(graph: Graph) -> float:
    """Return the host's time for loading kernels: in calls for it, or in launches of new kernels."""
    r, launches = graph.recorded, np.zeros(len(graph.recorded.start_s), bool)
    launches[r.call[graph.launched & ~r.lost & ~r.node & (r.trace_kernel != UNKNOWN)]] = True
    loads = r.name.codes_where(re.compile("ModuleLoad|LibraryLoad").search)
    return float(graph.costs.work[loads | (launches & (graph.costs.work > COLD_S))].sum())


def _few(trace: Trace, steps: Sequence[Step]) -> list[Step]:
    """Return the first steps, with at most MOST_ACTIVITIES kernels together, but at least one."""
    launched = np.sort(trace.kernels.launch_start_s[~np.isnan(trace.kernels.launch_start_s)])
    edges = np.searchsorted(launched, [[step.start_s, step.end_s] for step in steps])
    total = np.cumsum(edges[:, 1] - edges[:, 0])
    return list(steps[: max(1, int((total <= MOST_ACTIVITIES).sum()))])


def _runs(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    """Return the steps in groups of steps that follow each other with gaps shorter than a step."""
    usual_s = float(np.median([step.end_s - step.start_s for step in steps]))
    runs: list[list[Step]] = []
    for step in steps:
        if runs and step.start_s - runs[-1][-1].end_s < usual_s:
            runs[-1].append(step)
        else:
            runs.append([step])
    return [tuple(run) for run in runs]
