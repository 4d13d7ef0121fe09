"""Recorder of a loop, which records warm-up steps, timed steps and profiled steps.

After them, some more steps run without a profiler, in which a thread samples the stack.

Timed steps run as they would without a recorder: the device is synchronised at the begin and the end of the timing but
not between steps, which are timed by events on the device's clock. Profiled steps end with a synchronisation, so that
the work of one does not reach into the next. A step lasts from the end of the previous step to its own end, so it
includes waiting for input. With accumulated gradients, a step ends when the optimizer has stepped.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import BETWEEN, OTHER, OWN_PYTHON, UNSAMPLED, OutcomeRow, UnsampledRow
from cs_systems.analysis.comparison.loop_ranks import RankReport, tables_of
from cs_systems.config import ConfigError, RunConfig, one_of
from cs_systems.core import caveats, plugins
from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.core.experiments import DEFAULT_S
from cs_systems.core.tables import Tables
from cs_systems.core.units import counted
from cs_systems.core.validation import arguments_checked, is_number, is_whole, short_name, shown
from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.instrument.compiler import Observation, untraced
from cs_systems.instrument.probes import Probes
from cs_systems.machine.device import Device
from cs_systems.machine.environment import environment
from cs_systems.measure.profilers import Profiler, _nsys, rank_file
from cs_systems.measure.recorder import _again, _ranks, _result, hooks
from cs_systems.measure.recorder.outcome import Outcome
from cs_systems.measure.recorder.own_tools import OwnTools
from cs_systems.measure.recorder.padding import Padding
from cs_systems.measure.recorder.phases import Moment, Timeline, Tracker
from cs_systems.measure.recorder.rank_steps import FIRST_STEP, FIRST_STEPS, RankSteps
from cs_systems.measure.recorder.training import Training
from cs_systems.measure.recorder.watch import LEAST_SAMPLED, Watch
from cs_systems.measure.runtime import observed
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.profiled import prefix, with_profile
from cs_systems.measure.workloads import Unavailable
from cs_systems.record import STEADY, RunRecord, Sample, append_record

PROFILES = ("kineto", "nsys", "none")
STACKS = "stacks"  # the stage after all others, in which the stack is sampled; it has no record of its own
AFTER_FAILURE_S = 2.0  # time that rank 0 waits for the other ranks if its own loop has failed
AT_END_S = 5.0  # time that rank 0 waits at the end for what the other ranks observed; they end at about the same time
LOOP = "loop"  # the text of a rank about the whole loop, in the job's store


class Stage(NamedTuple):
    """Part of a recording: `steps` steps under the profiler `name`, timed without one, or with the stack sampled."""

    name: str
    steps: int
    profiler: Profiler

    @classmethod
    def of(cls, name: str, steps: int) -> Stage:
        return cls(name, steps, plugins.get("profilers", name))

    @property
    def is_timed(self) -> bool:
        return self.name == RunConfig.profiler

    @property
    def is_recorded(self) -> bool:
        return self.name != STACKS

    @property
    def words(self) -> str:
        return self.profiler.result or f"profile by {self.name}"


class Taken(NamedTuple):
    """Recorded step, and the number of compilations in this process up to its end."""

    timeline: Timeline
    compilations: int
    compile_s: float
    size: _result.StepInputs


class Updates:
    """Detector of parameter updates by version counters, because an optimizer in a compiled function runs no hook."""

    def __init__(self) -> None:
        self._before: int | None = None

    def are_new(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether a parameter has changed since the last call without a seen step."""
        now = sum(p._version for each in optimizers for group in each.param_groups for p in group["params"])
        before, self._before = self._before, now
        return before is not None and before != now

    def seen(self) -> None:
        """Drop the counters, because an optimizer was seen to step."""
        self._before = None


class Recorder:
    """Recorder of a training loop; a context manager around the loop.

    Args:
        model: the module that the loop calls, or several of them.
        optimizer: the optimizer, or several. With it, a step of the record ends where an optimizer has stepped.
        out: the folder of the records.
        name: the name of the loop in tables; by default the class of the model.
        warmup: steps before the timing.
        steps: timed steps.
        profile: "kineto", "none", or "nsys" in a process that runs under `nsys profile`.
        profile_steps: steps under the profiler and under the memory history; may be 0 without either.
        snapshot: also record a CUDA memory snapshot.
        stacks: after all others, record some more steps (3, or half a second's; up to two seconds' on a busy machine)
            in which a thread samples the stack, to name the lines of the program's own Python.
        tokens: tokens (or samples) of a step on one rank, from which the rate is computed; where steps differ, give
            them to `step`.
        device: the device of the loop; by default the device of the model's parameters.
        patience_s: how long rank 0 waits for the records of the other ranks.
        record_host: write the name of this host into the records, next to the date and the command.
        experiments: a function without arguments that runs one step of the loop again, on a batch that it holds. It
            is called after the last recorded step, for experiments; then all that it changed is restored.
        experiments_s: the time for all experiments; 0 for none.

    `records` holds the records that were written by this process.
    """

    _is_in_code = True  # the user wrote it into the loop, and gets errors and warnings there

    @arguments_checked
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: Any = None,
        *,
        out: str | os.PathLike[str],
        name: str | None = None,
        warmup: int = 5,
        steps: int = 20,
        profile: str = "kineto",
        profile_steps: int = 3,
        snapshot: bool = False,
        stacks: bool = True,
        tokens: int | None = None,
        device: str | torch.device | None = None,
        patience_s: float = 30.0,
        record_host: bool = False,
        experiments: Callable[[], Any] | None = None,
        experiments_s: float = DEFAULT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        models = _listed("model", model, nn.Module)
        if not models and model is not None:
            raise ConfigError("model is an empty list; give a torch Module, or leave out model")
        optimizers = _listed("optimizer", optimizer, Optimizer)
        if not callable(clock):
            raise ConfigError(f"clock is {shown(clock)}; give a function that returns seconds")
        one_of("profile", profile, PROFILES)
        if not isinstance(out, str | os.PathLike) or not os.fspath(out):
            raise ConfigError(f"out is {shown(out)}; give the folder of the records")
        for what, value in (("snapshot", snapshot), ("stacks", stacks), ("record_host", record_host)):
            if not isinstance(value, bool):
                raise ConfigError(f"{what} is {shown(value)}; give True or False")
        least_profiled = 0 if profile == RunConfig.profiler and not snapshot else 1
        counts = (("warmup", warmup, 0), ("steps", steps, 1), ("profile_steps", profile_steps, least_profiled))
        for what, count, least in counts:
            if not is_whole(count) or count < least:
                without = ", or pass profile='none' without snapshot" if what == "profile_steps" and least else ""
                raise ConfigError(f"{what} is {shown(count)}; give a whole number, at least {least}{without}")
        if tokens is not None and (not is_whole(tokens) or tokens < 1):
            raise ConfigError(f"tokens is {shown(tokens)}; give the tokens or samples of a step, a whole number from 1")
        if not is_number(patience_s) or not patience_s >= 0:
            raise ConfigError(f"patience_s is {shown(patience_s)}; give a number of seconds, at least 0")
        if experiments is not None and not (callable(experiments) and plugins.takes(experiments)):
            raise ConfigError(
                f"experiments is {shown(experiments)}; give a function without arguments that runs a step"
            )
        if not is_number(experiments_s) or not experiments_s >= 0:
            raise ConfigError(f"experiments_s is {shown(experiments_s)}; give a number of seconds, at least 0")
        if experiments is not None and not experiments_s:
            raise ConfigError("experiments is given, but experiments_s is 0; leave out one of them")
        default = " + ".join(type(m).__name__ for m in models) or "unnamed"
        name = short_name("name", default if name is None else name)
        place = Device(_device_of(models) if device is None else _named_device(device))
        profiles = [*([profile] if profile != RunConfig.profiler else []), *(["memory_snapshot"] if snapshot else [])]
        self._stages = [Stage.of(RunConfig.profiler, steps), *(Stage.of(each, profile_steps) for each in profiles)]
        if self._is_in_code and self._is_below_nsys and _ranks.rank() == 0 and not _nsys.started_this_process():
            raise ConfigError(f"profile is {profile!r}, but {_nsys.not_started(place.is_cuda)}")
        self._subject = _result.Subject(name, place, models, optimizers, tokens, _ranks.world_size())
        self._out, self._warmup, self._patience_s, self._clock = Path(out), warmup, patience_s, clock
        self._record_host, self._has_stacks = record_host, stacks
        self._again, self._experiments_s = experiments, experiments_s
        self._all_steps = warmup + sum(stage.steps for stage in self._stages)
        if stacks:
            self._stages.append(Stage(STACKS, LEAST_SAMPLED, Profiler(on_each_rank=True)))
        self.records: list[RunRecord] = []
        self._state = "new"
        self._step = _Step(self)
        self._tracker: Tracker | None = None  # None: not recording
        self._in_step = False
        self._given: list[int] = []  # tokens of the iterations of this step

    def step(self, tokens: int | None = None) -> _Step:
        """Return the context of one iteration of the loop; also a decorator of a function that runs one.

        tokens: tokens (or samples) of this iteration on this rank, where the batches differ in size.
        """
        if tokens is None:
            return self._step
        if not is_whole(tokens) or tokens < 0:
            raise ConfigError(f"tokens is {shown(tokens)}; give the tokens or samples of a step, a whole number from 0")
        if self._subject.tokens is not None:
            raise ConfigError("tokens= of Recorder and of step() exclude each other; leave out tokens= of Recorder")
        return _Step(self, tokens)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a context; all time inside belongs to phase `name` instead of the phases found inside."""
        if not isinstance(name, str) or not name.isprintable() or not name or len(name) > 200 or name == "step":
            remedy = "give a text of 1 to 200 printable characters, other than 'step'"
            raise ConfigError(f"the name of the phase is {shown(name)}; {remedy}")
        return nullcontext() if self._tracker is None else _Named(self._tracker, name)

    def __repr__(self) -> str:
        state = {"new": "not begun", "recording": "recording"}.get(self._state, "over")
        kinds = [f"{record.run_config.profiler} {record.status}" for record in self.records]
        listed = ", ".join(kinds).replace("none ", "timing ") or "none"
        return f"<{type(self).__name__}: {state}; records: {listed}>"

    @property
    def done(self) -> bool:
        """Flag that the recording is over, and the loop runs without hooks."""
        return self._state in ("done", "closed")

    def _watched_tools(self) -> OwnTools:
        tools = OwnTools()
        tools.watch()
        tools.find_prepared()
        return tools

    def __enter__(self) -> Recorder:
        if self._state != "new":
            raise RuntimeError("this Recorder was already used; make a new one for each loop")
        if hooks.is_active():
            raise RuntimeError(
                "another Recorder is active in this process; end its `with` block first, call its close(), or run a "
                "script with its own Recorder without cs-systems run"
            )
        self._meeting = _ranks.Meeting() if self._subject.world_size > 1 else None
        self._rank = _ranks.rank()
        self._is_writer = self._rank == 0
        if self._is_writer:
            Journal.prepare(self._out)
        device = self._subject.device
        self._before, self._probes = environment(device), Probes(device)
        self._warm: list[Taken] = []
        self._timed: list[Taken] = []
        self._precision: str | None = None
        self._count, self._failed, self._setup_s, self._began_s = 0, 0, 0.0, self._clock()
        self._outcome, self._updates = Outcome(), Updates()
        self._watch, self._padding = Watch(device, self._moment, self._probes.compilations), Padding()
        self._tracker = tracker = Tracker(device, self._clock, self._at_first_forward, self._at_backward)
        self._training = Training(
            tracker._unobserved,
            nullcontext if device.is_cuda else self._watch.own_time,  # a GPU works on while a look waits for it
            lambda: self._subject.models,
            lambda: self._subject.optimizers,
        )
        tracker.looks, self._outcome.at_skip = self._training, self._training.step_was_skipped
        self._installed, self._region = Observation(), ExitStack()
        # Of this rank alone: the record of the timing, the elements of its inputs, and what it exchanges.
        self._timing: RunRecord | None = None
        self._elements: float | None = None
        self._report: RankReport | None = None
        self._rank_steps = None if self._meeting is None else RankSteps(device, self._tracker)
        self._tools = self._watched_tools()
        # The program's own tools: the one that this stage waits for, and those that slow its timed steps.
        self._waits_for: str | None = None
        self._slowed_by: set[str] = set()
        self._tools.gives_way = self._give_way
        if self._warmup:
            self._tracker.at_inputs = self._look_at_inputs
        self._install(self._tracker)
        if self._rank_steps is not None and self._warmup:
            self._rank_steps.begin(FIRST_STEPS)
        self._state = "recording"
        if self._is_in_code:  # an unedited script keeps running
            observed.begin(self)
        atexit.register(self.close)
        _recorders.add(self)
        self._mallocs, self._compiled = device.device_mallocs(), self._probes.compilations()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)
        if error is None and self._count == 0:
            raise RuntimeError(
                "no step was recorded; write `with recorder.step():` around the body of the loop, and check that the "
                "loop has batches"
            )

    def close(self, error: BaseException | None = None) -> None:
        """End the recording now: remove the hooks, and write the record of the steps so far."""
        if self._state in ("new", "closed"):
            return
        atexit.unregister(self.close)
        if self._state == "recording":
            failure = self._tracker.failure if self._tracker is not None else None
            self._end_stage(
                _ended(error) if failure is None else f"the recording ended with {_described(failure)}", error
            )
            self._training.end()
            self._off()
        self._state = "closed"
        self._watch.close()
        try:
            self._conclude()
        except Exception as lost:  # catch everything: the record of the timing exists already
            warnings.warn(
                f"the findings about the whole loop were lost: {_described(lost)}", RuntimeWarning, stacklevel=2
            )
        if error is None and self._count > 0:
            self._warn_if_untimed()

    def _moment(self) -> Moment | None:
        tracker = self._tracker
        return tracker.moment() if tracker is not None else None

    def _conclude(self) -> None:
        """Write the record of the timing again, with what the whole loop has shown since."""
        own = self._timing
        if own is None or own.status != "ok" or own.measurement is None:
            return
        names = own.measurement.phase_names()
        phases_s = {name: own.measurement.median_s(name) or 0.0 for name in names}
        tables = self._watch.tables(phases_s, {name: own.measurement.durations_s(name) for name in names})
        tables |= self._training.tables
        if self._meeting is not None:
            tables |= self._tables_of_ranks(self._meeting, tables)
        number = next((n for n, r in enumerate(self.records) if not r.is_profiled), None)
        if number is None:  # another rank writes
            return
        record = self.records[number]
        if OWN_PYTHON.name not in tables:
            tables |= UNSAMPLED.filled([self._why_unsampled()])
        record = replace(record, results={**record.results, **tables})
        self.records[number] = record
        append_record(self._out, record)

    def _tables_of_ranks(self, meeting: _ranks.Meeting, own: Tables) -> Tables:
        """Leave what this rank observed to rank 0; there, return the tables of all ranks, if all have left theirs."""
        if self._report is None:
            return {}
        report: RankReport = {**self._report, "own_python": OWN_PYTHON.of(own)}
        if not self._is_writer:
            meeting.leave_if_open(LOOP, json.dumps(report))
            return {}
        texts = meeting.collect(LOOP, min(AT_END_S, self._patience_s))
        reports = [report, *map(json.loads, texts.values())]
        return tables_of(reports) if len(reports) == self._subject.world_size else {}

    def _why_unsampled(self) -> UnsampledRow:
        if not self._has_stacks:
            return {"reason": "stacks is False", "remedy": "leave out stacks=False"}
        more = counted(max(LEAST_SAMPLED, self._watch.steps_to_sample()), "more step")
        return {"reason": "the loop ended before its stack was sampled", "remedy": f"let it run for {more}"}

    def leave_to_parent(self) -> None:
        """Stop observing in this process, which is a fork of the recorded one."""
        atexit.unregister(self.close)
        self._watch_no_more()
        if self._state == "recording":
            self._off()

    def _watch_no_more(self) -> None:
        if self._state not in ("new", "closed"):
            self._watch.close()

    def _warn_if_untimed(self) -> None:
        """Warn if the loop ended before a step was timed, because nothing else shows that the record is an error."""
        record = next(iter(self.records), None)
        if self._is_in_code and record is not None and record.status == "error":
            warnings.warn(f"no step was timed: {record.reason}", RuntimeWarning, stacklevel=4)

    def _install(self, tracker: Tracker) -> None:
        self._outcome.observe(self._installed)
        if self._subject.device.is_cuda and self._is_below_nsys:
            self._tools.hold_captures()
        hooks.observe(self._installed, tracker, self._called())

    def _called(self) -> Sequence[nn.Module]:
        """Return the modules with calls that count as forward."""
        return self._subject.models

    @property
    def _is_below_nsys(self) -> bool:
        """Flag of a recording with a stage to come that nsys records, which must have started this process."""
        return any(stage.profiler.is_launcher for stage in self._stages)

    def _off(self) -> None:
        self._tracker = None
        if self._rank_steps is not None:
            self._rank_steps.end()
        self._subject = replace(self._subject, models=[], optimizers=[])  # the program may delete them
        self._outcome.start()
        self._installed.close()
        self._tools.close()
        observed.end(self)
        if self._is_in_code:
            self._watch.close()
        self._state = "done"

    def _at_first_forward(self) -> None:
        self._precision = _result.precision_of(self._subject.device, self._subject.models)

    def _at_backward(self, roots: Any) -> None:
        self._outcome.keep_loss(roots)
        if self._stages and not self._stages[0].is_recorded and self._watch.counts_operators():
            self._as_own_time(lambda: self._watch.backward_begins(roots, self._subject.models))

    @untraced
    def _step_begins(self, tokens: int | None = None) -> None:
        if self._tracker is None:
            if self._state == "new":
                raise RuntimeError(
                    "recorder.step() was used outside of the recorder; write `with recorder:` around the loop"
                )
            if self._state == "closed":
                raise RuntimeError("recorder.step() was used after the recorder's `with` block; move the loop into it")
            return
        if self._in_step:
            raise RuntimeError("a step began inside another step; use recorder.phase(name) for a part of a step")
        if self._count == 0:
            self._setup_s = self._clock() - self._began_s
        self._in_step = True
        if tokens is not None:
            self._given.append(tokens)
        self._tracker.rest(OTHER)

    @untraced
    def _step_ends(self, failed: bool) -> None:
        self._in_step = False
        tracker = self._tracker
        if tracker is None:
            return
        self._count += 1
        self._failed += failed
        if failed:  # discard its times; the next step begins here
            self._given.clear()
            if self._rank_steps is not None:
                self._rank_steps.step_failed()
            tracker.start()
        elif tracker.stepped or not self._subject.optimizers or self._updates.are_new(self._subject.optimizers):
            if tracker.stepped:
                self._updates.seen()
            self._watch.step_ended()
            self._take(tracker)
        else:  # gradients are being accumulated
            tracker.rest(BETWEEN)

    def _take(self, tracker: Tracker) -> None:
        """Record the step that ends here, and begin the next one."""
        tools = self._tools.slowing()
        self._watch.note_tools(tools)
        if self._waits_for is not None:
            self._given.clear()
            tracker.start()
            if not self._tools.in_use(self._stages[0].profiler.tool):
                self._soon(tracker, lambda: self._begin_next(tracker))
            return
        is_warmup = len(self._warm) < self._warmup
        stage = self._stages[0]
        timeline = tracker.end(synchronize=stage.is_recorded and not stage.is_timed)
        if self._rank_steps is not None:
            self._rank_steps.step_ended(self._count, timeline)
            if stage.is_timed and len(self._warm) + is_warmup >= self._warmup:
                self._rank_steps.end()
        tokens = sum(self._given) if self._given else None
        self._given.clear()
        size = _result.StepInputs(tracker.calls, tokens, tracker.iterators)
        taken = Taken(timeline, *self._probes.compilations(), size)
        (self._warm if is_warmup else self._timed).append(taken)
        self._training.step_ended()
        if is_warmup and self._warmup > 1:  # not in the last step, so that the timing begins undisturbed
            self._training.look(len(self._warm) < max(2, self._warmup - 1))
        if is_warmup and len(self._warm) == self._warmup:
            self._training.timing_begins()
            self._mallocs = self._subject.device.device_mallocs()
            self._outcome.start()
            self._watch.look_at_containers()
            tracker.at_inputs = None
        if stage.is_timed and not is_warmup:
            self._slowed_by |= tools
        if len(self._timed) >= stage.steps and (stage.is_recorded or self._watch.samples_enough()):
            self._complete(tracker)
        else:
            tracker.start()

    def _complete(self, tracker: Tracker) -> None:
        """End a stage that has all its steps."""
        self._soon(tracker, lambda: self._next_stage(tracker))

    def _soon(self, tracker: Tracker, call: Callable[[], object]) -> None:
        """Call the function as soon as hooks may be removed."""
        self._as_own_time(call)

    def _as_own_time(self, call: Callable[[], object]) -> None:
        """Call the function, whose time is not the loop's."""
        self._watch.pause()
        with self._watch.own_time():
            call()

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
            if not stage.is_timed:
                self._watch.sample_all(stage.profiler.measures != "memory")
            if not stage.is_recorded:
                self._training.look(True)
                self._stages[0] = stage._replace(steps=self._watch.steps_to_sample())
                assert self._tracker is not None
                self._tracker.at_inputs = lambda _: self._watch.model_called(torch.is_grad_enabled())
                if self._rank_steps is not None:
                    self._rank_steps.begin(FIRST_STEP)
                return
            if not self._is_writer and not stage.profiler.on_each_rank:
                self._stages.pop(0)
                continue
            if self._tools.in_use(stage.profiler.tool):
                self._waits_for = stage.profiler.tool
                return
            self._waits_for = None
            try:
                self._out.mkdir(parents=True, exist_ok=True)  # on another machine than rank 0's
                region = stage.profiler.region(self._path(stage), self._subject.device, self._model())
                with self._tools.ours(stage.profiler.tool):
                    self._region.enter_context(region)
            except Exception as error:
                status = "unavailable" if isinstance(error, Unavailable) else "error"
                self._publish(self._failure(stage, status, str(error)), stage, 0)
                self._stages.pop(0)
                continue
            assert self._tracker is not None
            self._tracker.has_ranges = True
            return
        self._training.end()
        self._off()

    def _give_way(self) -> None:
        """End our profile without a result, because the program begins its own; retry when that has ended."""
        stage = self._stages[0]
        self._leave_region()
        for file in self._files(stage):
            file.unlink()
        self._timed, self._waits_for = [], stage.profiler.tool
        if self._tracker is not None:
            self._tracker.begin_stage()

    def _end_stage(self, ended: str | None, error: BaseException | None) -> None:
        """Write the record of this stage. `ended`: how the loop ended before its last step."""
        stage = self._stages.pop(0)
        if stage.is_timed:
            self._watch.find_growing_container()
            calls = self._timed[-1].size.calls if self._timed else ()
            self._training.timing_ended([shapes[0] for _, shapes in calls if shapes], self._subject.device)
        if not stage.is_recorded:
            assert self._tracker is not None
            self._tracker.end_stage()
            self._watch.sample_all(False)
            self._keep_report()
            return
        try:
            self._leave_region()
            record = self._record(stage, ended, error)
            if stage.is_timed:
                self._timing = record
                self._elements = _result.elements([taken.size for taken in self._timed])
            if ended is None and not any(later.is_recorded for later in self._stages):
                record = self._with_experiments(record)
            self._publish(record, stage, AFTER_FAILURE_S if error is not None else self._patience_s)
        except Exception as lost:  # catch everything: a lost record must not end the user's loop
            what = "timing" if stage.is_timed else stage.words
            remedy = "" if "; " in str(lost) else "; remove the cause, then run the loop again"
            text = f"the record of the {what} was lost: {_described(lost)}{remedy}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        if stage.is_timed:
            self._warm = self._timed[-STEADY:]  # a profile is compared with these
            self._warmup = len(self._warm)
        self._keep_report()
        self._timed = []
        self._outcome.start()
        self._compiled = self._probes.compilations()
        if ended is not None:
            self._stages.clear()

    def _keep_report(self) -> None:
        """Keep what the ranks exchanged in the steps so far, whose times can be read at the end of a stage."""
        if self._rank_steps is not None:
            self._report = self._rank_steps.report(self._rank, self._subject.models, self._elements)

    def _with_experiments(self, record: RunRecord) -> RunRecord:
        """Return the record of the last stage with experiments, whose steps are not observed."""
        assert self._tracker is not None
        of = self._subject
        tracker, self._tracker = self._tracker, None
        try:
            with tracker._unobserved(), hidden_from_modes():
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
            reason = f"{ended} {self._before_which(stage)}; {self._remedy(stage, error)}"
            if stage.is_timed:
                return self._failure(stage, "error" if error is None else _result.status_of(error), reason)
            for file in self._files(stage):
                file.unlink()
            return self._failure(stage, "unavailable", reason)
        now, device = self._subject.device.device_mallocs(), self._subject.device
        config = self._config(stage)
        record = _result.success(
            self._subject,
            config,
            self._samples(),
            [taken.size for taken in self._timed],
            self._before,
            repeat=Journal(self._out).times_done(config),
            setup_s=self._setup_s,
            seen=self._tracker.seen if self._tracker else (),
            recomputed_s=sum(taken.timeline.recomputed_s() for taken in self._timed),
            precision=self._precision,
            ended=ended,
            missing=[later.words for later in self._stages if later.is_recorded] if ended is not None else (),
            mallocs=now - self._mallocs if device.is_cuda and now is not None and self._mallocs is not None else None,
            outcome=self._outcome_row(),
            padding=self._padding if stage.is_timed else None,
        )
        if stage.is_timed and self._slowed_by:
            record = with_caveat(record, caveats.own_tools(self._slowed_by))
        if stage.profiler.is_launcher and self._tools.captures_held:
            record = with_caveat(record, caveats.own_capture(self._tools.captures_held))
        if self._is_below_nsys:
            what = "timed in a process that nsys had started; it traced nothing yet"
            record = with_caveat(record, Caveat("below-nsys", what, REMEDIES["below-nsys"]))
        return record

    def _outcome_row(self) -> OutcomeRow:
        assert self._tracker is not None
        with self._tracker._unobserved(), hidden_from_modes():
            return self._outcome.row()

    def _look_at_inputs(self, arguments: Any) -> None:
        tracker = self._tracker
        if tracker is not None and tracker.calls.total() == 1:  # the first call of a step
            with tracker._unobserved():
                self._padding.look(arguments)

    def _before_which(self, stage: Stage) -> str:
        """Return a phrase for the point at which the loop ended that left this stage without a step."""
        if self._waits_for is not None:
            return f"while its own {self._waits_for} was active, which excludes a {stage.words} of ours"
        if stage.is_timed:
            return f"after {len(self._warm)} of {self._warmup} warm-up steps"
        return f"before the {stage.words} was recorded"

    def _remedy(self, stage: Stage, error: BaseException | None) -> str:
        """Return the remedy for a stage without a step. Ctrl-C and sys.exit() do not count as errors of the script."""
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

    def _samples(self) -> list[Sample]:
        """Return the samples of this stage, its warm-up first."""
        samples, before = [], self._compiled
        for i, taken in enumerate((*self._warm, *self._timed)):
            graphs, spent_s = taken.compilations - before[0], round(taken.compile_s - before[1], 9)
            sample = taken.timeline.sample(warmup=i < len(self._warm))
            samples.append(replace(sample, compiles=max(0, graphs), compile_s=max(0.0, spent_s)))
            before = taken.compilations, taken.compile_s
        return samples

    def _failure(self, stage: Stage, status: str, reason: str) -> RunRecord:
        config = self._config(stage)
        return _result.failure(
            config, self._before, repeat=Journal(self._out).times_done(config), status=status, reason=reason
        )

    def _profiled(self, record: RunRecord, stage: Stage) -> RunRecord:
        if record.status != "ok":
            return record
        if stage.profiler.is_launcher:
            return self._without_report(record)
        return with_profile(record, stage.profiler, self._path(stage), keep=True)

    def _without_report(self, record: RunRecord) -> RunRecord:
        """Return the record of a profile by nsys, which writes its report only when the process has ended."""
        what, remedy = "nsys writes its report when the process has ended", "cs-systems analyze REPORT.nsys-rep"
        return with_caveat(record, Caveat("no-tables", what, remedy))

    def _publish(self, record: RunRecord, stage: Stage, patience_s: float) -> None:
        """Write the record of one process, or on rank 0 of all ranks; a profile's record includes the ranks' traces."""
        if not self._is_writer and self._meeting is not None:
            files = [file.name for file in self._files(stage)]
            self._meeting.leave(stage.name, record.to_json() if stage.is_timed else json.dumps(files))
            return
        record = record.stamped(record_host=self._record_host)
        if not stage.is_timed:
            record = self._profiled(record, stage)
        if self._meeting is not None and stage.is_timed:
            record = _ranks.with_others(record, self._meeting.collect(stage.name, patience_s))
        elif self._meeting is not None and record.status == "ok" and stage.profiler.on_each_rank:
            left = self._meeting.collect(stage.name, patience_s)
            traces = {f"trace_rank{rank}": name for rank, names in left.items() for name in json.loads(names)}
            here = {what: name for what, name in traces.items() if (self._out / name).is_file()}
            record = replace(record, artifacts=record.artifacts | here)
        self._append(record, stage)

    def _append(self, record: RunRecord, stage: Stage) -> None:
        if self._is_writer:
            append_record(self._out, record)
            self.records.append(record)

    def _config(self, stage: Stage) -> RunConfig:
        return self._subject.config(warmup=self._warmup, steps=stage.steps, profiler=stage.name)

    def _path(self, stage: Stage) -> Path:
        config = self._config(stage)
        return rank_file(prefix(self._out, config, Journal(self._out).times_done(config)), self._rank)

    def _files(self, stage: Stage) -> list[Path]:
        """Return the files that a profiler wrote in this process."""
        path = self._path(stage)
        return sorted(path.parent.glob(f"{path.name}.*"))

    def _model(self) -> nn.Module | None:
        """Return the module that a profiler annotates; None if a compiler made its parts one function."""
        plain = [m.module if isinstance(m, DistributedDataParallel) else m for m in self._subject.models]
        plain = [m for m in plain if not hasattr(m, "_orig_mod") and m._compiled_call_impl is None]
        return nn.ModuleList(plain) if len(plain) > 1 else next(iter(plain), None)


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for recorder in [*_recorders]:
        recorder.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class _Step(ContextDecorator):
    """Context of one step."""

    def __init__(self, recorder: Recorder, tokens: int | None = None) -> None:
        self._recorder, self._tokens = recorder, tokens

    def __enter__(self) -> None:
        self._recorder._step_begins(self._tokens)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._recorder._step_ends(failed=kind is not None)


class _Named:
    """Context of a named phase."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker, self._name = tracker, name

    def __enter__(self) -> None:
        self._tracker.enter_named(self._name)

    def __exit__(self, *_: object) -> None:
        self._tracker.exit_named(self._name)


def with_caveat(record: RunRecord, caveat: Caveat) -> RunRecord:
    return replace(record, warnings=(*record.warnings, caveat))


def _listed(what: str, given: Any, kind: type) -> list[Any]:
    """Return one object or several as a list. Raises ConfigError for another type."""
    if given is None:
        return []
    several = isinstance(given, Sequence) and not isinstance(given, (str, kind))
    objects = list(given) if several else [given]
    for each in objects:
        if not isinstance(each, kind):
            found = f"{what} {'contains' if several else 'is'} {shown(each)}"
            raise ConfigError(f"{found}; give an instance of a torch {kind.__name__}, or a list of them")
    return objects


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    """Return the device of the models' parameters; without parameters, the default device of torch."""
    parameters = (p for model in models for p in model.parameters())
    found = next((p.device for p in parameters if p.device.type != "meta"), None)
    if found is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _named_device(device: Any) -> torch.device:
    """Return the device of that name. Raises ConfigError."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {shown(device)}; give cpu, cuda or cuda:N, or a torch.device") from None
    if named.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {named}, but torch finds no CUDA device; leave out device")
    return named


def _ended(error: BaseException | None) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the loop was interrupted"
    return f"the loop ended with {_described(error)}" if isinstance(error, Exception) else "the loop ended"


def _described(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
