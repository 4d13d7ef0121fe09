"""Sequence of a recording: its stages, and the record at the end of each.

Timed steps run as they would without a recorder: the device is synchronised at the start and the end of the timing, but
not between steps; events on the device's clock time the steps. Profiled steps end with a synchronisation, so that the
work of one does not reach into the next. At the end, a thread samples the stack in some more steps without a profiler.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cs_systems.analysis.comparison.loop_findings import UnsampledRow
from cs_systems.analysis.timing_caveats import launch_bound_phases
from cs_systems.core import caveats
from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.core.units import counted
from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.instrument.compiler import Observation
from cs_systems.instrument.probes import Probes
from cs_systems.measure.recorder import _again, _result, hooks
from cs_systems.measure.recorder.activation_formulas import ActivationFormulas
from cs_systems.measure.recorder.anomaly import Anomaly
from cs_systems.measure.recorder.attention_weights import AttentionWeights
from cs_systems.measure.recorder.calls import Calls
from cs_systems.measure.recorder.copied_factors import CopiedFactors
from cs_systems.measure.recorder.covariances import Covariances
from cs_systems.measure.recorder.cut_samples import CutSamples
from cs_systems.measure.recorder.denormals import Denormals
from cs_systems.measure.recorder.distribution_checks import DistributionChecks
from cs_systems.measure.recorder.double import Double
from cs_systems.measure.recorder.double_softmax import DoubleSoftmax
from cs_systems.measure.recorder.empty_clipping import EmptyClipping
from cs_systems.measure.recorder.energy import Energy
from cs_systems.measure.recorder.evaluation_mode import EvaluationMode
from cs_systems.measure.recorder.flat_operators import FlatOperators
from cs_systems.measure.recorder.fused_updates import FusedUpdates
from cs_systems.measure.recorder.hook_numbers import HookNumbers
from cs_systems.measure.recorder.input_gradients import InputGradients
from cs_systems.measure.recorder.inputs import StepInputs, elements, sizes
from cs_systems.measure.recorder.learning_rates import LearningRates
from cs_systems.measure.recorder.loaded_weights import LoadedWeights
from cs_systems.measure.recorder.module_calls import ModuleCalls
from cs_systems.measure.recorder.observers import Observer, Observers, hiding
from cs_systems.measure.recorder.one_hot import OneHot
from cs_systems.measure.recorder.other_threads import OtherThreads
from cs_systems.measure.recorder.outcome import Outcome
from cs_systems.measure.recorder.own_tools import OwnTools
from cs_systems.measure.recorder.padding import Padding
from cs_systems.measure.recorder.paired_targets import PairedTargets
from cs_systems.measure.recorder.passes import Passes
from cs_systems.measure.recorder.phases import Moment
from cs_systems.measure.recorder.product_order import ProductOrders
from cs_systems.measure.recorder.product_types import ProductTypes
from cs_systems.measure.recorder.random_draws import RandomDraws
from cs_systems.measure.recorder.rank_steps import RankSteps
from cs_systems.measure.recorder.remade_optimizers import RemadeOptimizers
from cs_systems.measure.recorder.repeated_rows import RepeatedRows
from cs_systems.measure.recorder.replicas import Replicas
from cs_systems.measure.recorder.same_derivatives import SameDerivatives
from cs_systems.measure.recorder.samples_as_time import SamplesAsTime
from cs_systems.measure.recorder.single_elements import SingleElements
from cs_systems.measure.recorder.slow_settings import SlowSettings
from cs_systems.measure.recorder.sparse_factors import SparseFactors
from cs_systems.measure.recorder.stages import PROFILES, Stage, Taken
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.threads import Threads
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.recorder.training import Training
from cs_systems.measure.recorder.undone_updates import UndoneUpdates
from cs_systems.measure.recorder.unread_rows import UnreadRows
from cs_systems.measure.recorder.unregistered import Unregistered
from cs_systems.measure.recorder.unused_outputs import UnusedOutputs
from cs_systems.measure.recorder.versions import Updates
from cs_systems.measure.recorder.watch import LEAST_SAMPLED, Watch
from cs_systems.measure.recorder.writing import Writer, with_caveat
from cs_systems.measure.runtime import observed
from cs_systems.measure.workloads import Unavailable
from cs_systems.record import STEADY, RunRecord, Sample

AFTER_FAILURE_S = 2.0  # time that rank 0 waits for the other ranks if its own loop failed


class Recording:
    """State of a recording; a `Recorder` calls it at the start and end of each step of the loop."""

    _is_in_code = True  # the user wrote it into the loop, so errors and warnings appear there

    def __init__(
        self,
        subject: Subject,
        stages: list[Stage],
        writer: Writer,
        *,
        patience_s: float,
        again: Callable[[], Any] | None,
        experiments_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._subject, self._stages, self._writer, self.records = subject, stages, writer, writer.records
        self._patience_s, self._clock = patience_s, clock
        self._again, self._experiments_s = again, experiments_s
        self._has_stacks = not stages[-1].is_recorded
        self._all_steps = stages[0].warmup + sum(stage.steps for stage in stages if stage.is_recorded)
        self._state = "new"
        self._tracker: Tracker | None = None  # None: not recording
        self._given: list[int] = []  # tokens of the iterations of this step

    def _begin(self) -> None:
        device = self._subject.device
        self._warm: list[Taken] = []
        self._timed: list[Taken] = []
        self._precision: str | None = None
        self._count, self._failed, self._setup_s, self._began_s = 0, 0, 0.0, self._clock()
        # for this rank alone: the record of the timing, and the elements of its inputs and the calls with them
        self._timing: RunRecord | None = None
        self._elements: float | None = None
        self._sizes: list[int] = []
        self._call_numbers: list[int] = []
        self._has_workers = False  # a data loader with workers gave batches
        self._probes, self._updates = Probes(device), Updates()
        self._tools = self._watched_tools()
        # tools of the program: the one that this stage waits for, and those that slow its timed steps
        self._waits_for: str | None = None
        self._slowed_by: set[str] = set()
        self._tools.gives_way = self._give_way
        self._installed, self._region = Observation(), ExitStack()
        self._tracker = tracker = Tracker(device, self._clock, self._at_first_forward)
        self._watch = Watch(
            device,
            self._moment,
            self._probes.compilations,
            lambda: self._subject.models,
            lambda: self._subject.world_size > 1,
        )
        # a GPU keeps working while a look waits for it
        hidden = hiding(tracker.unobserved, nullcontext if device.is_cuda else self._watch.own_time)
        self._outcome = Outcome(lambda optimizer: tracker.observers.update_skipped(optimizer))
        of = self._subject
        self._mode, self._loaded = EvaluationMode(of, tracker), LoadedWeights(of)
        self._product_types = ProductTypes()
        of_calls = OneHot(of), SamplesAsTime(), Padding(), UnusedOutputs(of, tracker), AttentionWeights()

        def compiled() -> int:
            return self._probes.compilations()[0]

        every: list[Observer] = [
            self._watch, Training(of, hidden), HookNumbers(of, hidden), Double(of), Calls(), Passes(of), Anomaly(),
            ModuleCalls(tracker, hidden, compiled, of_calls), *of_calls, Threads(),
            self._outcome, RemadeOptimizers(), LearningRates(), DoubleSoftmax(), Unregistered(of),
            SlowSettings(of), PairedTargets(), InputGradients(of), Energy(of), OtherThreads(of), self._mode,
            self._loaded, RandomDraws(tracker, hidden, compiled), EmptyClipping(tracker), RepeatedRows(of, compiled),
            FlatOperators(of), CutSamples(of, tracker), Covariances(of, tracker, compiled), ProductOrders(of, compiled),
            SparseFactors(of, compiled), UnreadRows(of, compiled), ActivationFormulas(of, compiled), SameDerivatives(),
            DistributionChecks(tracker), FusedUpdates(of), Denormals(hidden), SingleElements(tracker, compiled),
            CopiedFactors(of, compiled), UndoneUpdates(of), self._product_types,
        ]  # fmt: skip
        if self._writer.meeting is not None:
            replicas = Replicas()
            every += [replicas, RankSteps(of, tracker, self._writer.meeting, self._patience_s, replicas)]
        self._observers = tracker.observers = Observers(self._used(every), hidden)
        self._install(tracker)
        self._observers.begin(self._stages[0].period(0))
        self._state = "recording"
        self._mallocs, self._compiled = device.device_mallocs(), self._probes.compilations()

    def _used(self, every: Sequence[Observer]) -> Sequence[Observer]:
        """Return the observers of this kind of loop."""
        return every

    def _watched_tools(self) -> OwnTools:
        tools = OwnTools()
        tools.watch()
        tools.find_prepared()
        return tools

    def _install(self, tracker: Tracker) -> None:
        self._outcome.observe(self._installed)
        self._mode.observe(self._installed)
        self._loaded.observe(self._installed)
        if self._subject.device.is_cuda and self._is_below_nsys:
            self._tools.hold_captures()
        hooks.observe(self._installed, tracker, self._called())

    def _called(self) -> Sequence[nn.Module]:
        """Return the modules with calls that count as forward."""
        return self._subject.models

    @property
    def _is_below_nsys(self) -> bool:
        """Flag of a recording with a later stage under nsys, which must have started this process."""
        return any(stage.profiler.is_launcher for stage in self._stages)

    def _moment(self) -> Moment | None:
        tracker = self._tracker
        return tracker.moment() if tracker is not None else None

    def _at_first_forward(self) -> None:
        self._precision = _result.precision_of(self._subject.device, self._subject.models)

    def _computes_in(self) -> str | None:
        """Return the precision of the model's calls; that of their products if forward enters autocast itself."""
        inside = self._product_types.autocast if self._precision in ("fp32", "tf32") else None
        return inside or self._precision

    def _is_last(self, steps: int) -> bool:
        """Return whether the loop's step of this number is the last one to record, or to sample the stack in."""
        return self._tracker is None if self._has_stacks else steps == self._all_steps

    def _finish(self) -> None:
        """End the recording after its last stage."""
        self._observers.end()
        self._off()

    def _off(self) -> None:
        self._tracker = None
        self._observers.stop_looking()
        self._subject.forget()
        self._installed.close()
        self._tools.close()
        observed.end(self)
        if self._is_in_code:
            self._watch.close()
        self._state = "done"

    def _take(self, tracker: Tracker) -> None:
        """Record the step that ends here, and begin the next one."""
        tools, begun = self._tools.slowing(), self._tools.begun()
        self._watch.note_tools(tools, begun)
        if self._waits_for is not None:
            self._given.clear()
            tracker.start()
            if not self._tools.in_use(self._stages[0].profiler.tool):
                self._soon(tracker, lambda: self._begin_next(tracker))
            return
        stage = self._stages[0]
        is_warmup = len(self._warm) < stage.warmup
        timeline = tracker.end(synchronize=stage.is_recorded and not stage.is_timed)
        tokens = sum(self._given) if self._given else None
        collates_rows, starts_workers = bool(tracker.collates_rows), tracker.starts_workers
        size = StepInputs(tracker.calls, tokens, tracker.iterators, collates_rows, starts_workers)
        self._given.clear()
        (self._warm if is_warmup else self._timed).append(Taken(timeline, *self._probes.compilations(), size))
        self._observers.step_recorded(self._count, timeline)
        if is_warmup:
            self._warmed_up(stage)
        elif stage.is_timed:
            self._slowed_by |= tools | begun
        if len(self._timed) >= stage.steps and (stage.is_recorded or self._watch.samples_enough()):
            self._complete(tracker)
        else:
            tracker.start()

    def _begin_again(self) -> None:
        """Drop the recorded steps, because they did not belong to the loop."""
        self._warm, self._timed, self._mallocs = [], [], None
        self._count = 0
        self._observers.restart()
        self._observers.begin(self._stages[0].period(0))

    def _warmed_up(self, stage: Stage) -> None:
        """Begin the next period if this warm-up step was the last of its period."""
        period = stage.period(len(self._warm))
        if period is not self._observers.period:
            with self._watch.own_time():  # functions that observers replace are no work of the step
                self._observers.begin(period)
        if len(self._warm) == stage.warmup:
            self._mallocs = self._subject.device.device_mallocs()

    def _complete(self, tracker: Tracker) -> None:
        """End a stage with all its steps done."""
        self._soon(tracker, lambda: self._next_stage(tracker))

    def _soon(self, tracker: Tracker, call: Callable[[], object]) -> None:
        """Call the function as soon as hooks may be removed."""
        self._as_own_time(call)

    def _as_own_time(self, call: Callable[[], object]) -> None:
        """Call the function while the device is idle, and exclude its time from the loop."""
        self._watch.pause()
        self._wait()
        with self._watch.own_time():
            call()
            self._wait()

    def _wait(self) -> None:
        with nullcontext() if self._tracker is None else self._tracker.unobserved():
            self._subject.device.synchronize()

    def _next_stage(self, tracker: Tracker) -> None:
        self._end_stage(None, None)
        self._begin_next(tracker)

    def _begin_next(self, tracker: Tracker) -> None:
        self._begin_stage()
        if self._tracker is not None:
            tracker.begin_stage()

    def _begin_stage(self) -> None:
        """Begin the next stage that can run here, or end the recording."""
        while self._stages:
            stage = self._stages[0]
            self._observers.begin(stage.period(len(self._warm)))
            if not stage.is_recorded:
                self._stages[0] = stage._replace(steps=self._watch.steps_to_sample())
                return
            if not self._writer.is_first_rank and not stage.profiler.on_each_rank:
                self._stages.pop(0)
                continue
            if self._tools.in_use(stage.profiler.tool):
                self._waits_for = stage.profiler.tool
                return
            self._waits_for = None
            try:
                # on a machine other than rank 0's, the folder may not exist
                self._writer.out.mkdir(parents=True, exist_ok=True)
                region = stage.profiler.region(self._writer.path(stage), self._subject.device, self._model())
                with self._tools.ours(stage.profiler.tool):
                    self._region.enter_context(region)
            except Exception as error:
                status = "unavailable" if isinstance(error, Unavailable) else "error"
                self._writer.publish(self._writer.failure(stage, status, str(error)), stage, 0)
                self._stages.pop(0)
                continue
            assert self._tracker is not None
            self._tracker.has_ranges = True
            return
        self._finish()

    def _give_way(self) -> None:
        """End this profile without a result, because the program begins its own; retry after that one has ended."""
        stage = self._stages[0]
        self._leave_region()
        self._writer.remove_files(stage)
        self._timed, self._waits_for = [], stage.profiler.tool
        if self._tracker is not None:
            self._tracker.begin_stage()

    def _end_stage(self, ended: str | None, error: BaseException | None) -> None:
        """Write the record of this stage.

        ended: how the loop ended before its last step.
        """
        stage = self._stages.pop(0)
        if stage.is_timed:
            calls = self._timed[-1].size.calls if self._timed else ()
            self._observers.timing_ended([shapes[0] for _, shapes in calls if shapes])
        if not stage.is_recorded:
            assert self._tracker is not None
            self._tracker.end_stage()
            return
        try:
            self._leave_region()
            record = self._record(stage, ended, error)
            if stage.is_timed:
                self._timing = record
                self._elements = elements([taken.size for taken in self._timed])
                self._sizes = sizes([taken.size for taken in self._timed])
                self._call_numbers = [taken.size.calls.total() for taken in self._timed]
                self._has_workers = self._tracker is not None and self._tracker.has_workers
            if ended is None and not any(later.is_recorded for later in self._stages):
                record = self._with_experiments(record)
            self._writer.publish(record, stage, AFTER_FAILURE_S if error is not None else self._patience_s)
        except Exception as lost:  # catch everything: a lost record must not end the user's loop
            what = "timing" if stage.is_timed else stage.words
            remedy = "" if "; " in str(lost) else "; remove the cause, then run the loop again"
            text = f"the record of the {what} was lost: {described(lost)}{remedy}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        if stage.is_timed:
            self._warm = self._timed[-STEADY:]  # a profile is compared with these steps
            warm = len(self._warm)
            self._stages = [each._replace(warmup=warm) if each.is_recorded else each for each in self._stages]
        self._timed = []
        self._compiled = self._probes.compilations()
        if ended is not None:
            self._stages.clear()

    def _with_experiments(self, record: RunRecord) -> RunRecord:
        """Return the record of the last stage with the experiments, which are not observed."""
        assert self._tracker is not None
        of = self._subject
        tracker, self._tracker = self._tracker, None
        try:
            with tracker.unobserved(), hidden_from_modes():
                return _again.with_experiments(
                    record, self._again, self._experiments_s, of.device, of.models, of.optimizers, of.world_size
                )
        finally:
            self._tracker = tracker

    def _leave_region(self) -> None:
        assert self._tracker is not None
        self._tracker.close_ranges()
        with self._tools.ours(None):
            self._region.close()
        self._tracker.end_stage()

    def _record(self, stage: Stage, ended: str | None, error: BaseException | None) -> RunRecord:
        if not self._timed:
            reason = f"{ended} {self._when_ended(stage)}; {self._remedy(stage, error)}"
            if stage.is_timed:
                return self._writer.failure(stage, "error" if error is None else _result.status_of(error), reason)
            self._writer.remove_files(stage)
            return self._writer.failure(stage, "unavailable", reason)
        now, device = self._subject.device.device_mallocs(), self._subject.device
        inputs = [taken.size for taken in self._timed]
        record = _result.success(
            self._subject,
            self._writer.config(stage),
            self._samples(),
            inputs,
            self._writer.before,
            repeat=self._writer.times_done(stage),
            setup_s=self._setup_s,
            seen=self._tracker.seen if self._tracker else (),
            recomputed_s=sum(taken.timeline.recomputed_s() for taken in self._timed),
            precision=self._computes_in(),
            ended=ended,
            missing=[later.words for later in self._stages if later.is_recorded] if ended is not None else (),
            mallocs=now - self._mallocs if device.is_cuda and now is not None and self._mallocs is not None else None,
            shown=self._observers.results(inputs, stage.is_timed),
        )
        if stage.is_timed and self._slowed_by:
            record = with_caveat(record, caveats.own_tools(self._slowed_by))
        for found in self._cost_of_phases(record) if stage.is_timed else ():
            record = with_caveat(record, found)
        if stage.profiler.is_launcher and self._tools.captures_held:
            record = with_caveat(record, caveats.own_capture(self._tools.captures_held))
        if self._is_below_nsys:
            what = "timed in a process that nsys had started; it traced nothing yet"
            record = with_caveat(record, Caveat("below-nsys", what, REMEDIES["below-nsys"]))
        return record

    def _cost_of_phases(self, record: RunRecord) -> Iterator[Caveat]:
        measured = record.measurement
        if measured is None or (self._subject.device.is_cuda and not launch_bound_phases(measured)):
            return iter(())  # a GPU with enough work hides it, and the host may wait for its queue
        steps = [taken.timeline for taken in self._timed]
        boundaries = round(median(step.boundaries() for step in steps))
        return caveats.observed(median(step.own_s for step in steps), measured.median_s() or math.inf, boundaries)

    def _samples(self) -> list[Sample]:
        """Return the samples of this stage, its warm-up first."""
        samples, before = [], self._compiled
        for i, taken in enumerate((*self._warm, *self._timed)):
            graphs, spent_s = taken.compilations - before[0], round(taken.compile_s - before[1], 9)
            sample = taken.timeline.sample(warmup=i < len(self._warm))
            samples.append(replace(sample, compiles=max(0, graphs), compile_s=max(0.0, spent_s)))
            before = taken.compilations, taken.compile_s
        return samples

    def _when_ended(self, stage: Stage) -> str:
        """Return a phrase for when the loop ended, for a stage that got no step."""
        if self._waits_for is not None:
            return f"while its own {self._waits_for} was active, with which no {stage.words} can be made"
        if stage.is_timed:
            return f"after {len(self._warm)} of {stage.warmup} warm-up steps"
        return f"before the {stage.words} was recorded"

    def _remedy(self, stage: Stage, error: BaseException | None) -> str:
        """Return the remedy for a stage without a step."""
        done = len(self._warm)
        if isinstance(error, Exception):
            is_oom = _result.status_of(error) == "oom"
            return "use a smaller batch or model" if is_oom else "correct the script"
        if self._waits_for is not None:
            return f"end it {stage.steps + 1} steps before the loop ends, or {self._without(stage)}"
        longer = f"let it run for at least {max(self._all_steps, self._count + stage.steps)} steps"
        if not stage.is_timed:
            return f"{longer}, or {self._without(stage)}"
        if done == 0 and self._count > 1:
            if self._failed == self._count:
                return "no step ended without an exception; correct the loop"
            return f"none of {self._count} steps called step() of a torch optimizer; call it, or leave out optimizer"
        return longer + (f", or time fewer steps: {self._shorter(done)}" if done > 1 else "")

    def _shorter(self, done: int) -> str:
        return f"warmup=1, steps={done - 1}"

    def _without(self, stage: Stage) -> str:
        return "leave out snapshot" if stage.name not in PROFILES else "pass profile='none'"

    def _why_unsampled(self) -> UnsampledRow:
        if not self._has_stacks:
            return {"reason": "stacks is False", "remedy": "leave out stacks=False"}
        if not self._watch.can_sample:
            reason = "the loop runs outside of the main thread, and only that one's stack is sampled"
            return {"reason": reason, "remedy": "call the loop in the main thread"}
        more = counted(max(LEAST_SAMPLED, self._watch.steps_to_sample()), "more step")
        return {"reason": "the loop ended before its stack was sampled", "remedy": f"let it run for {more}"}

    def _model(self) -> nn.Module | None:
        """Return the module that a profiler annotates; None if a compiler merged its parts into one function."""
        plain = [m.module if isinstance(m, DistributedDataParallel) else m for m in self._subject.models]
        plain = [m for m in plain if not hasattr(m, "_orig_mod") and m._compiled_call_impl is None]
        return nn.ModuleList(plain) if len(plain) > 1 else next(iter(plain), None)


def described(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
