"""Observer of a whole loop: the time of each step, its memory, the garbage collector, and the lines of slow steps.

It costs a usual step some microseconds. A thread samples the stack only if a step lasts more than twice the median so
far, and in a few additional steps after the timing.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from torch import get_num_threads, nn

from cs_systems.analysis.comparison import loop_findings as found
from cs_systems.analysis.comparison.loop_growth import (
    Growth,
    fastest,
    follows_inputs,
    is_of_machine,
    memory_growth,
    time_growth,
    varies,
)
from cs_systems.analysis.comparison.loop_start import slow_start
from cs_systems.analysis.comparison.loop_time import LoopTimeRow, whole_loop_time
from cs_systems.core.step_kinds import StepKind, step_kinds
from cs_systems.core.tables import Row, Tables
from cs_systems.instrument.compiler import untraced
from cs_systems.machine.device import Device
from cs_systems.measure.recorder import kept, lengths
from cs_systems.measure.recorder.batches import ModelCalls
from cs_systems.measure.recorder.element_sums import FEWEST, ElementSum, element_sums
from cs_systems.measure.recorder.garbage import Collections
from cs_systems.measure.recorder.graph_size import GraphSize, graph_size, largest_broadcast
from cs_systems.measure.recorder.lines import (
    Usual,
    inner_lines,
    lines_of,
    lines_of_sums,
    most_of,
    own_python,
    places_of,
    slow_steps,
)
from cs_systems.measure.recorder.memory import Memory
from cs_systems.measure.recorder.observers import UNTIMED, ModelCall, Observer, Period, Timing
from cs_systems.measure.recorder.other_programs import OtherPrograms
from cs_systems.measure.recorder.phases import BACKWARD, FORWARD, INPUT, OPTIMIZER, Moment
from cs_systems.measure.recorder.stacks import CoreQueue, Line, Sample, Sampler, function_of, own_lines, place_of
from cs_systems.measure.recorder.step_clock import StepClock

CLEAR = 2.0  # times the rise of any other phase; noise raises each phase a little
FEWEST_STEPS = 3  # number of steps from which the median shows how long a step usually lasts
SLOW = 2.0  # times the median, after which a step is sampled
LATEST = 15  # number of steps of the running median
SAMPLED_S, MOST_SAMPLED_S = 0.5, 2.0  # total time to sample after the timing; the longer one if samples are rare
LEAST_SAMPLED, MOST_SAMPLED = 3, 200  # limits of the number of these steps
ENOUGH_LOOKS = 100  # enough samples of the stack; a busy machine gives fewer
BUSIER = 0.1  # rise of the share of the cores that other programs use
BUSY = 0.25  # such a share; threads of operators then wait for each other, and by turns more or less
BY_OTHERS = 2.5  # times that they may make a step longer, through caches and cores that are shared
BY_SPINNING = 30  # the same where the threads of an operator wait for each other without a pause; 10 was seen
MOST_BY_OTHERS = 3.5  # the same where they become busier and busier; 2.7 was seen
STEPS_WITH_SUMS = 3  # most sampled steps in which running totals are looked for
FEWEST_WITH_WORKERS = 60  # steps that show growth of the input; the first ones take batches that wait already
SLOWER = 1.5  # times as long as the timed steps are later ones that the answer mentions
NEAR = 10  # number of steps on each side that show how much longer sampling makes a step
SHORT_S = 0.005  # longest step that sampling may make notably longer
LEAST_S = 1e-7  # a shorter step has only waited
WAITED = 0.05  # share of the median step; a step that worked less than this has waited, which hides its work


class Watch(Observer):
    """Watch over the loop in the thread that makes it, until it is closed.

    phase_of: returns the current `Moment`, or None. compilations: returns the number of compilations in this process so
    far. models: the models of the loop.
    """

    runs_operators = False

    def __init__(
        self,
        device: Device,
        phase_of: Callable[[], Moment | None],
        compilations: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        models: Callable[[], Sequence[nn.Module]] = tuple,
        is_rank: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.is_inference = False  # the loop runs only forward passes, with inputs from earlier results
        self._is_rank = is_rank  # whether the loop may wait for other ranks
        self._device, self._models = device, models
        self._compilations = compilations
        self._collections = Collections()
        self._sampler = Sampler(phase_of, self._collections.total)
        self._memory, self._others = Memory(device), OtherPrograms()
        self._queue, self._queued_before_s = CoreQueue(), 0.0
        self._sizes: dict[str, int] = {}
        self._sized_at = 0
        self._kept: kept.Kept | None = None
        self._lengths: list[tuple[int, lengths.Look]] = []
        self._growing: list[lengths.Longer] = []
        self._model_calls = ModelCalls()
        self.all_sampled = range(0)  # the steps that were sampled from their start
        self.restart()
        self._own_s = self._cpu_before_s = 0.0
        self._collections.begin()

    def restart(self) -> None:
        self.durations_s: list[float] = []  # by the host's clock
        self._clock = StepClock(self._device)
        self._cpu_s: list[float] = []  # CPU time of the process, by step
        self._queued_s: dict[int, float] = {}  # time for which the loop's thread waited for a core, by step
        self._compiling, self._compiled = set[int](), self._compilations()[0]
        self._profiled = set[int]()  # steps under a profiler of the recording, which last longer
        self._profiled_from: int | None = None
        self._end_s: float | None = None
        self._limit_s = float("inf")
        self._last_slow, self._next_slow = 0, -1  # the next one is expected at the same distance as the last two
        self._expected = set[int]()
        self._tools: dict[int, Set[str]] = {}  # tools active at the start of each step
        self._begun_tools: dict[int, Set[str]] = {}  # tools begun in each step
        self._sampler.samples.clear()
        self._memory.clear()
        self._others.clear()
        self._model_calls.clear()
        self._operators: GraphSize | None = None
        self._broadcast: tuple[tuple[int, ...], int, int] | None = None
        self._sums: dict[int, list[ElementSum]] = {}  # running totals in the first sampled steps
        self.all_sampled = range(0)

    @untraced
    def step_ended(self) -> None:
        """Note the end of a step, and begin the next one."""
        now, own_s, queued_s = time.perf_counter(), self._own_s, self._queue.total_s()
        cpu_s, self._own_s = time.process_time(), 0.0
        self._clock.step_ended(len(self.durations_s) if self._end_s is not None else -1, own_s)
        if self._end_s is not None:
            lasted_s, number = max(0.0, now - self._end_s - own_s), len(self.durations_s)
            self.durations_s.append(lasted_s)
            self._cpu_s.append(cpu_s - self._cpu_before_s)
            self._queued_s[number] = queued_s - self._queued_before_s
            if (compiled := self._compilations()[0]) != self._compiled:
                self._compiled = compiled
                self._compiling.add(number)
            if lasted_s > self._limit_s:
                self._next_slow, self._last_slow = 2 * number - self._last_slow, number
            if number >= FEWEST_STEPS and (number < LATEST or number % 5 == 0):
                self._limit_s = SLOW * median(self.durations_s[-LATEST:])
        self._end_s, self._queued_before_s, self._cpu_before_s = now, queued_s, cpu_s
        number = len(self.durations_s)
        if self._memory.read(now, number):  # which may take as long as many steps, and is no work of the next one
            self._end_s, self._queued_before_s = time.perf_counter(), self._queue.total_s()
            self._cpu_before_s = time.process_time()
        if not self._device.is_cuda:
            self._others.read(now, cpu_s, number)
        self._collections.step_begins(number)
        is_expected = number == self._next_slow
        if is_expected:
            self._expected.add(number)
        self._sampler.step_begins(number, 0.0 if is_expected else self._limit_s)

    def note_tools(self, active: Set[str], begun: Set[str]) -> None:
        """Note the program's own tools that slow the step that begins now, and those begun in the step that ends."""
        self._begun_tools[len(self.durations_s) - 1] = begun
        self._tools[len(self.durations_s)] = active

    @contextmanager
    def own_time(self) -> Iterator[None]:
        """Exclude the time in this context, which the recording itself takes, from the current step."""
        begin_s, queued_s, cpu_s = time.perf_counter(), self._queue.total_s(), time.process_time()
        self._sampler.own_begins()
        try:
            yield
        finally:
            lasted_s = time.perf_counter() - begin_s
            self._sampler.own_ends(lasted_s)
            self._own_s += lasted_s
            self._queued_before_s += self._queue.total_s() - queued_s
            self._cpu_before_s += time.process_time() - cpu_s

    def pause(self) -> None:
        """Observe nothing until the next step begins, because the recording itself works now."""
        self._sampler.pause()
        self._collections.step_begins(None)

    @property
    def can_sample(self) -> bool:
        """Flag of a loop in the main thread, where its stack can be sampled."""
        return self._sampler.has_begun

    def steps_to_sample(self) -> int:
        """Return the number of steps to run for the sampler: half a second, and a full period if there is one."""
        kinds = [kind for kind in self._kinds() if kind.positions[-1] >= FEWEST_STEPS]
        usual_s = max(kinds[0].median_s, 1e-6) if kinds else SAMPLED_S
        wanted = max(LEAST_SAMPLED, min(MOST_SAMPLED, round(SAMPLED_S / usual_s)))
        periods = [kind.every for kind in kinds if kind.every and kind.every <= MOST_SAMPLED]
        return max([wanted, *periods])

    def samples_enough(self) -> bool:
        """Return whether the steps sampled from their start are enough, or more of them would take too long."""
        lasted_s = self.durations_s[self.all_sampled.start :]
        if len(lasted_s) >= MOST_SAMPLED or sum(lasted_s) >= MOST_SAMPLED_S:
            return True
        samples = self._sampler.samples  # in the order of the steps
        return len(samples) - bisect_left(samples, self.all_sampled.start, key=lambda each: each.step) >= ENOUGH_LOOKS

    def _lasted_s(self) -> list[float]:
        """Return the duration of each step, on a GPU by the device's clock."""
        return self._clock.durations_s(self.durations_s)

    def _worked_s(self) -> list[float]:
        """Return the duration of each step without waiting for a core, which is due to the machine and not the loop.

        A GPU may work meanwhile, so that its steps keep this time.
        """
        queued_s = {} if self._device.is_cuda else self._queued_s
        return [max(LEAST_S, lasted_s - queued_s.get(n, 0.0)) for n, lasted_s in enumerate(self._lasted_s())]

    def _kinds(self) -> list[StepKind]:
        """Return the kinds of undisturbed steps that did not compile, by their time without waiting for a core.

        Steps of a profile have the usual time until the kinds are known, so that periodic steps keep their distance.
        """
        worked_s = self._worked_s()
        others = [n for n in range(len(worked_s)) if n not in self._compiling]
        alone = [worked_s[n] for n in others if n not in self._profiled]
        usual_s = median(alone) if alone else LEAST_S
        kinds: list[StepKind] = []
        for kind in step_kinds([usual_s if n in self._profiled else worked_s[n] for n in others]):
            steps = tuple(n for at in kind.positions if (n := others[at]) not in self._profiled)
            if steps:
                times_s = [worked_s[n] for n in steps]
                kinds.append(replace(kind, positions=steps, median_s=median(times_s), total_s=math.fsum(times_s)))
        return kinds

    def sample_all(self, wanted: bool) -> None:
        """Begin or end sampling each step from its start."""
        done = len(self.durations_s)
        before = self.all_sampled
        self.all_sampled = range(done + 1, sys.maxsize) if wanted else range(before.start, min(before.stop, done))
        self._sampler.sample_all(wanted)

    def begins(self, period: Period) -> None:
        self.is_looking = period is Period.SAMPLED
        self._end_profile()
        if period in (Period.PROFILED, Period.HISTORY):
            self._profiled_from = len(self.durations_s)
        if period is Period.FIRST:
            self._lengths.clear()
        elif period in UNTIMED or period is Period.TIMED:
            self._lengths.append((len(self.durations_s), lengths.of(sys._getframe(1))))
        if period is Period.TIMED:
            self._sizes, self._sized_at = kept.sizes(sys._getframe(1)), len(self.durations_s)
        elif period in (Period.PROFILED, Period.HISTORY, Period.SAMPLED):
            self.sample_all(period is not Period.HISTORY)

    def _end_profile(self) -> None:
        """Note the steps of a profile that ends here, in the step that is running."""
        if self._profiled_from is not None:
            self._profiled.update(range(self._profiled_from, len(self.durations_s) + 1))
            self._profiled_from = None

    def look_before_backward(self, roots: Any) -> None:
        """Note its place; count the operators of forward before it, in the first step sampled from its start."""
        self._model_calls.add_backward(own_lines(sys._getframe(1))[0])
        after = len(self.durations_s) - self.all_sampled.start
        if self._device.is_cuda or not self.all_sampled or after < 0:
            return
        if after:
            self._look_for_sums(after, roots)
            return
        self.pause()
        self._broadcast = largest_broadcast(roots) or self._broadcast
        size = graph_size(roots, self._models())
        if size is not None and (before := self._operators) is not None:
            sums = before.operators + size.operators, before.arithmetic_s + size.arithmetic_s
            size = GraphSize(*sums, size.has_recurrent)
        self._operators = size

    def _look_for_sums(self, after: int, roots: Any) -> None:
        """Note the running totals in the steps after the first sampled one, which is not sampled to its end."""
        is_large = self._operators is not None and self._operators.operators >= FEWEST
        is_next = after == 1 or (after <= STEPS_WITH_SUMS and any(self._sums.values()))
        if is_large and is_next:
            self._sums.setdefault(len(self.durations_s), []).extend(element_sums(roots))

    def look_at_call(self, call: ModelCall) -> None:
        """Note the place that calls a model."""
        self._model_calls.add(own_lines(sys._getframe(1))[0], call.is_recorded)

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Find what has got longer in the timed steps, and the container that has grown, if memory grows."""
        steps = len(self.durations_s) - self._sized_at
        if steps >= FEWEST_STEPS:
            looks = [*self._lengths, (len(self.durations_s), lengths.of(sys._getframe(1)))]
            self._growing = lengths.grown(looks)
            if self._grows():
                self._kept = kept.grown(sys._getframe(1), self._sizes, steps)

    def end(self) -> None:
        self._end_profile()
        self.sample_all(False)

    def close(self) -> None:
        self.sample_all(False)
        self._sampler.close()
        self._others.close()
        self._queue.close()
        self._memory.close()
        self._collections.end()

    def _grows(self) -> bool:
        later = self._memory.after(FEWEST_STEPS)
        return any(readings[-1][1] > readings[0][1] for readings in later if readings)

    def tables(self, timing: Timing, others: Tables) -> Tables:
        made: dict[str, Sequence[Row]] = {}
        durations_s, worked_s = self._lasted_s(), self._worked_s()
        alone = [n for n in range(len(durations_s)) if n not in self._profiled]
        compiling = {position for position, n in enumerate(alone) if n in self._compiling}
        sampled = {position for position, n in enumerate(alone) if n in self.all_sampled}
        longer = self._longer_by_sampling([(n, durations_s[n]) for n in alone if n not in self._compiling])
        whole: list[LoopTimeRow] = whole_loop_time([durations_s[n] for n in alone], compiling, sampled, longer)
        kinds = self._kinds()
        by_step = [*self._sampler.samples]
        if not {BACKWARD, OPTIMIZER} & timing.phases_s.keys():  # forward passes are the loop's work
            by_step = [_in_forward(sample) for sample in by_step]
        if whole:
            made |= found.WHOLE_LOOP.filled(whole)
        if kinds:
            usual = self._usual_sampled(kinds)
            of_usual = [s for s in by_step if s.step in {*usual}]
            calls = self._model_calls
            are_fed_by = _never if self.is_inference else calls.are_fed_by
            own = own_python(
                of_usual,
                timing.phases_s,
                are_fed_by,
                calls.go_into_loss,
                calls.polled,
                calls.are_made_by,
                lambda line, line_s: lengths.read_at(line, self._growing, line_s),
            )
            usually = Usual(
                kinds[0].median_s,
                timing.phases_s,
                lines_of(of_usual, len(usual)),
                places_of(of_usual, len(usual)),
            )
            first, start = self._slow_start(timing.all_s, timing.has_workers)
            slow = [
                self._with_timed_phases(
                    slow_steps(kind, usually, worked_s, by_step, self._is_whole, self._extra_cpu_s(kind, kinds[0])),
                    kind,
                    kinds[0],
                    timing.all_s,
                )
                for kind in kinds[1:]
                if kind.median_s > kinds[0].median_s and len({*kind.positions} & first) <= len(kind.positions) / 2
            ]
            made |= found.OWN_PYTHON.filled(own) if own else {}
            inner = inner_lines(of_usual, timing.phases_s, is_cpu=self._device.torch.type == "cpu")
            made |= found.INNER_LINES.filled(inner) if inner else {}
            if self._broadcast is not None:
                shape, before, after = self._broadcast
                written = " × ".join(map(str, shape))
                row: found.BroadcastRow = {
                    "shape": written, "elements": math.prod(shape), "from_elements": before, "to_elements": after
                }  # fmt: skip
                made |= found.BROADCASTS.filled([row])
            sums = lines_of_sums(by_step, of_usual, timing.phases_s, self._sums)
            made |= found.ELEMENT_SUMS.filled([sums]) if sums else {}
            made |= found.FORWARD_OPERATORS.filled(self._forward_operators(of_usual))
            made |= found.SLOW_STEPS.filled(slow) if slow else {}
            grown = [*self._memory_growth()]
            is_by_inputs = not self.is_inference and follows_inputs([*enumerate(timing.sizes, self._sized_at)])
            if not varies(timing.calls, timing.sizes) and not is_by_inputs:
                grown += self._time_growth(kinds[0], timing.all_s, timing.has_workers)
            if self.is_inference:
                grown = [{**row, "is_inference": True} for row in grown]
            made |= found.GROWTH.filled(grown) if grown else {}
            made |= found.SLOW_START.filled(start) if start else {}
            later = [] if grown else self._later_steps(kinds[0], max(map(len, timing.all_s.values()), default=0))
            made |= found.LATER_STEPS.filled(later) if later else {}
        tools = [*self._own_tools()]
        made |= found.OWN_TOOLS.filled(tools) if tools else {}
        collected = self._collections.row(len(durations_s), sum(durations_s))
        made |= found.COLLECTIONS.filled([collected]) if collected else {}
        return made

    def _extra_cpu_s(self, kind: StepKind, usual: StepKind) -> float:
        """Return the CPU time of steps of a kind beyond as many usual ones'."""
        usual_s = median(self._cpu_s[n] for n in usual.positions)
        return math.fsum(self._cpu_s[n] - usual_s for n in kind.positions)

    def _with_timed_phases(
        self, row: found.SlowStepsRow, kind: StepKind, usual: StepKind, phases: Mapping[str, Sequence[float]]
    ) -> found.SlowStepsRow:
        """Return the row with the phase of the extra time, from the timed steps if no slow step was sampled."""
        if row["phase"] is not None:
            return row
        extra_s: dict[str, float] = {}
        for name, times_s in phases.items():
            timed = range(self._sized_at, self._sized_at + len(times_s))
            slow, others = ([times_s[n - timed.start] for n in of.positions if n in timed] for of in (kind, usual))
            if slow and others:
                extra_s[name] = median(slow) - median(others)
        if not extra_s or max(extra_s.values()) <= 0:
            return row
        waits = 2 * extra_s.get(INPUT, 0.0) > sum(each for each in extra_s.values() if each > 0)
        return {**row, "phase": max(extra_s, key=extra_s.__getitem__), "waits_for_batch": waits}

    def _forward_operators(self, samples: Sequence[Sample]) -> list[found.ForwardOperatorsRow]:
        if self._operators is None:
            return []
        lines: Counter[Line] = Counter()
        for sample in samples:
            if sample.leaf is not None and sample.phase is not None and sample.phase.phase() == FORWARD:
                lines[sample.leaf] += sample.time_s  # type: ignore[assignment]
        most = most_of(lines) if lines else None
        function, place = (None, None) if most is None else (function_of(most), place_of(most))
        return [{**self._operators._asdict(), "function": function, "place": place}]  # type: ignore[typeddict-item]

    def _usual_sampled(self, kinds: Sequence[StepKind]) -> list[int]:
        """Return the usual steps among those sampled from their start.

        If the machine has become busy since, all of them are slower than usual; then all count as usual, without
        periodic steps.
        """
        periodic = {n for kind in kinds[1:] if kind.every for n in kind.positions}
        others = [n for kind in kinds for n in kind.positions if n in self.all_sampled and n not in periodic]
        return [n for n in kinds[0].positions if n in self.all_sampled] or others

    def _own_tools(self) -> Iterator[found.OwnToolRow]:
        """Yield a row for each tool of the program, including steps in which it begins or ends."""
        under = {
            number: self._tools[number] | self._tools[number + 1] | self._begun_tools.get(number, set())
            for number in self._tools
            if number + 1 in self._tools and number >= FEWEST_STEPS and number not in self._compiling
        }
        worked_s = self._worked_s()
        others_s = [worked_s[number] for number, active in under.items() if not active]
        without_s = median(others_s) if len(others_s) >= FEWEST_STEPS else None
        for tool in sorted({tool for active in under.values() for tool in active}):
            with_s = [worked_s[number] for number, active in under.items() if tool in active]
            yield {
                "tool": tool,
                "steps": len(with_s),
                "of_steps": len(under),
                "with_s": median(with_s),
                "without_s": without_s,
                "extra_s": None if without_s is None else sum(with_s) - without_s * len(with_s),
                "total_s": sum(worked_s[number] for number in under),
            }

    def _is_whole(self, step: int) -> bool:
        """Return whether a step was sampled from its start."""
        return step in self.all_sampled or step in self._expected

    def _memory_growth(self) -> Iterator[found.GrowthRow]:
        for quantity, readings in zip(
            (found.HOST_MEMORY, "device memory"), self._memory.after(FEWEST_STEPS), strict=True
        ):
            growth = memory_growth(readings)
            if growth is None:
                continue
            is_kept = self._kept is not None or quantity != found.HOST_MEMORY
            if is_kept or self._memory.grows_in_use(FEWEST_STEPS, growth.last - growth.first):
                yield _growth_row(quantity, growth, self._kept, None)

    def _time_growth(
        self, usual: StepKind, phases: Mapping[str, Sequence[float]], has_workers: bool = False
    ) -> Iterator[found.GrowthRow]:
        slower = functools.partial(self._slower, is_of_machine=not self._device.is_cuda and is_of_machine(phases))
        worked_s = self._worked_s()
        least_s = WAITED * median(worked_s)
        times = [(n, worked_s[n]) for n in usual.positions if n >= FEWEST_STEPS and worked_s[n] >= least_s]
        alone = [step for step in times if step[0] not in self.all_sampled]
        times = self._as_without_sampling(times)
        tried = (slower(time_growth(each)) for each in (times, fastest(times), alone, fastest(alone)))
        rises = _rises(phases)
        if (growth := next(filter(None, tried), None)) is not None:
            waits = 2 * rises.get(INPUT, 0.0) > sum(rise for rise in rises.values() if rise > 0)
            if not (waits and has_workers) or growth.steps >= FEWEST_WITH_WORKERS:
                yield _growth_row("step time", growth, None, _clearest(rises, growth.per_step))
        elif (of_other := slower(time_growth([*enumerate(phases.get(found.OTHER, ()))]))) is not None:
            yield _growth_row(found.IN_NO_PHASE, of_other, None, found.OTHER)

    def _as_without_sampling(self, times: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return the steps with the sampled ones as short as those just before, because sampling makes steps longer."""
        longer = self._longer(times)
        return [(n, time_s / longer if n in self.all_sampled else time_s) for n, time_s in times]

    def _longer(self, times: Sequence[tuple[int, float]]) -> float:
        """Return how many times as long as the last steps before the first sampled ones are; at least 1."""
        before = [time_s for n, time_s in times if n < self.all_sampled.start][-NEAR:]
        sampled = [time_s for n, time_s in times if n in self.all_sampled][:NEAR]
        return max(1.0, median(sampled) / median(before)) if before and sampled and median(before) else 1.0

    def _longer_by_sampling(self, times: Sequence[tuple[int, float]]) -> float:
        """Return how many times as long as the steps on both sides the sampled ones are, if steps are short; else 1.

        If the steps after the sampling last as long, or steps are not short, the reason is another one, such as longer
        batches.
        """
        before = [time_s for n, time_s in times if n < self.all_sampled.start][-NEAR:]
        after = [time_s for n, time_s in times if n >= self.all_sampled.stop][:NEAR]
        sampled = [time_s for n, time_s in times if n in self.all_sampled]
        if not before or not sampled:
            return 1.0
        usual_s = max(median(each) for each in (before, after) if each)
        return max(1.0, median(sampled) / usual_s) if 0 < usual_s <= SHORT_S else 1.0

    def _slower(self, growth: Growth | None, is_of_machine: bool) -> Growth | None:
        """Return the growth unless other programs, which have become busier, or a slower machine may be its cause."""
        if growth is None or growth.last >= MOST_BY_OTHERS * growth.first:
            return growth
        return None if is_of_machine or self._others.rise(FEWEST_STEPS) >= BUSIER else growth

    def _slow_start(
        self, phases: Mapping[str, Sequence[float]], has_workers: bool
    ) -> tuple[set[int], list[found.SlowStartRow]]:
        """Return the first steps of the loop and their row, if they are much slower than all later ones.

        has_workers: workers of a data loader count among the other programs.
        """
        worked_s = self._worked_s()
        if self._is_rank() and not self._device.is_cuda:  # the others' waits for a core are waits of this rank for them
            worked_s = [min(times) for times in zip(worked_s, self._cpu_s, strict=True)]
        # steps that are sampled from their start, or observed by a tool of the program, take longer than otherwise
        others = self._compiling | self._profiled | {n for n, active in self._tools.items() if active}
        known = [n for n in range(len(worked_s)) if n not in self.all_sampled and n not in others]
        start = slow_start([worked_s[n] for n in known], len(worked_s) // 2)
        if start is None:
            return set(), []
        first = {*known[: start.steps]}
        end = max(first) + 1
        was_busy = self._others.share_before(end) >= BUSY and not has_workers
        is_by_others = was_busy or self._others.fall_after(end) >= BUSIER
        spins = not self._device.is_cuda and get_num_threads() > 1
        if is_by_others and start.each_s < (BY_SPINNING if spins else BY_OTHERS) * start.later_s:
            return set(), []
        known_s = sum(worked_s[n] for n in known)
        falls = {name: -rise for name, rise in _rises(phases).items()}
        most = max(falls, key=falls.__getitem__, default=None)
        return first, [
            {
                "steps": start.steps,
                "timed": sum(n >= self._sized_at for n in first),
                "each_s": start.each_s,
                "later_s": start.later_s,
                "extra_s": sum(worked_s[n] for n in first) - start.steps * start.later_s,
                "total_s": known_s + (len(worked_s) - len(known)) * start.later_s,
                "phase": most if most is not None and falls[most] > start.later_s else None,
            }
        ]

    def _later_steps(self, usual: StepKind, timed: int) -> list[found.LaterStepsRow]:
        """Return the row of the steps after the timed ones, if they usually take much longer; else []."""
        worked_s, end = self._worked_s(), self._sized_at + timed
        times_s = worked_s[self._sized_at : end]
        later_s = [worked_s[n] for n in usual.positions if n >= end and n not in self.all_sampled]
        if not times_s or len(later_s) < timed or median(later_s) < SLOWER * median(times_s):
            return []
        return [{"steps": len(worked_s), "timed": timed, "timed_s": median(times_s), "later_s": median(later_s)}]


def _in_forward(sample: Sample) -> Sample:
    """Return a sample as one of a loop in which no forward pass has gradients."""
    if sample.phase is None:
        return sample
    return sample._replace(phase=sample.phase._replace(is_without_gradients=False))


def _never(chain: tuple[Line, ...]) -> bool:
    return False


def _rises(phases: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the rise of each phase's time, from the median of the first third of the timed steps to the last third."""
    third = {name: len(times_s) // 3 for name, times_s in phases.items() if len(times_s) >= 2 * FEWEST_STEPS}
    return {name: median(phases[name][-n:]) - median(phases[name][:n]) for name, n in third.items()}


def _clearest(rises: Mapping[str, float], least_s: float) -> str | None:
    """Return the phase that rises at least CLEAR times as much as any other; None without one, as under noise.

    least_s: what a step takes longer than the one before it; a phase that rises less in all timed steps is noise.
    """
    found = sorted(rises, key=rises.__getitem__, reverse=True)
    is_clear = len(found) == 1 or (len(found) > 1 and rises[found[0]] >= CLEAR * rises[found[1]])
    return found[0] if is_clear and rises[found[0]] >= least_s else None


def _growth_row(quantity: str, growth: Growth, holder: kept.Kept | None, phase: str | None) -> found.GrowthRow:
    return {
        "quantity": quantity,
        "steps": growth.steps,
        "first": growth.first,
        "last": growth.last,
        "per_step": growth.per_step,
        "kept": holder.name if holder else None,
        "kept_tensors": holder.what if holder else None,
        "place": holder.place if holder else None,
        "phase": phase,
    }
