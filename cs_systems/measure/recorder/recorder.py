"""Recorder of a loop, which records warm-up steps, timed steps and profiled steps.

A step lasts from the end of the previous step to its own end, so it includes waiting for input. With accumulated
gradients, a step ends when the optimizer has stepped. `recording` has the sequence of stages, `observers` the
observations.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from cs_systems.analysis.comparison.loop_findings import BETWEEN, OTHER, OWN_PYTHON, UNSAMPLED
from cs_systems.config import ConfigError
from cs_systems.core.experiments import DEFAULT_S
from cs_systems.core.validation import arguments_checked, is_whole, short_name, shown
from cs_systems.instrument.compiler import untraced
from cs_systems.machine.device import Device
from cs_systems.measure.profilers import _nsys
from cs_systems.measure.recorder import _ranks, arguments, hooks
from cs_systems.measure.recorder.observers import Timing
from cs_systems.measure.recorder.recording import Recording, described
from cs_systems.measure.recorder.stages import stages_of
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.recorder.writing import Writer
from cs_systems.measure.runtime import observed


class Recorder(Recording):
    """Recorder of a training loop; a context manager around the loop.

    Args:
        model: the module that the loop calls, or several of them.
        optimizer: the optimizer, or several. With it, a step of the record ends where an optimizer has stepped.
        out: the folder of the records.
        name: the name of the loop in tables; by default the class of the model.
        warmup: steps before the timing.
        steps: timed steps.
        profile: "kineto", "none", "nsys" in a process that runs under `nsys profile`, or "auto": kineto on a GPU, and
            none on a CPU.
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

    _waits_for_nsys = False
    _writer_class = Writer

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
        models, optimizers = arguments.models_of(model), arguments.optimizers_of(optimizer)
        arguments.check(locals())
        default = " + ".join(type(m).__name__ for m in models) or "unnamed"
        name = short_name("name", default if name is None else name)
        place = Device(arguments.device_of(device, models))
        subject = Subject(name, place, models, optimizers, tokens, _ranks.world_size())
        stages = stages_of(
            profile,
            on_gpu=place.is_cuda,
            warmup=warmup,
            steps=steps,
            profile_steps=profile_steps,
            snapshot=snapshot,
            stacks=stacks,
        )
        folder = Path(out).absolute()  # the loop may change the directory
        writer = self._writer_class(folder, subject, record_host=record_host, waits_for_nsys=self._waits_for_nsys)
        super().__init__(
            subject, stages, writer, patience_s=patience_s, again=experiments, experiments_s=experiments_s, clock=clock
        )
        if self._is_in_code and self._is_below_nsys and _ranks.rank() == 0 and not _nsys.started_this_process():
            raise ConfigError(f"profile is {profile!r}, but {_nsys.not_started(place.is_cuda)}")
        self._step = _Step(self)
        self._in_step = False

    def step(self, tokens: int | None = None) -> _Step:
        """Return the context of one iteration of the loop; also a decorator of a function that runs one.

        tokens: tokens (or samples) of this iteration on this rank, where the batches differ in size.
        """
        if tokens is None:
            return self._step
        if not is_whole(tokens) or tokens < 0:
            raise ConfigError(
                f"tokens is {shown(tokens)}; give the number of tokens or samples of the step, a whole number from 0"
            )
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
        """Flag for a finished recording; the loop then runs without hooks."""
        return self._state in ("done", "closed")

    def __enter__(self) -> Recorder:
        if self._state != "new":
            raise RuntimeError("this Recorder was already used; make a new one for each loop")
        for each in [*_recorders]:
            each.give_way()
        if hooks.is_active():
            raise RuntimeError(
                "another Recorder is active in this process; end its `with` block first, call its close(), or run a "
                "script with its own Recorder without cs-systems run"
            )
        self._writer.begin()
        self._begin()
        if self._is_in_code:  # an unedited script keeps running
            observed.begin(self)
        atexit.register(self.close)
        _recorders.add(self)
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
                _ended(error) if failure is None else f"the recording ended with {described(failure)}", error
            )
            self._finish()
        self._state = "closed"
        self._watch.close()
        try:
            self._conclude()
        except Exception as lost:  # catch everything, because the record of the timing exists already
            warnings.warn(
                f"the findings about the whole loop were lost: {described(lost)}", RuntimeWarning, stacklevel=2
            )
        if error is None and self._count > 0:
            self._warn_if_untimed()

    def _conclude(self) -> None:
        """Write the record of the timing again, with the tables about the whole loop."""
        own = self._timing
        if own is None or own.status != "ok" or own.measurement is None:
            return
        names = own.measurement.phase_names()
        phases_s = {name: own.measurement.median_s(name) or 0.0 for name in names}
        all_s = {name: own.measurement.durations_s(name) for name in names}
        of_models = self._elements, self._sizes, self._call_numbers
        tables = self._observers.tables(Timing(phases_s, all_s, *of_models, self._has_workers))
        if OWN_PYTHON.name not in tables:
            tables = {**tables, **UNSAMPLED.filled([self._why_unsampled()])}
        self._writer.add(tables)

    def give_way(self) -> None:
        """Make room for a Recorder of the script that begins, where this one may."""

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
            self._observers.step_failed()
            tracker.start()
        elif tracker.stepped or not self._subject.optimizers or self._updates.are_new(self._subject.optimizers):
            if tracker.stepped:
                self._updates.seen()
            self._watch.step_ended()
            self._take(tracker)
        else:  # gradients are being accumulated
            tracker.rest(BETWEEN)


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


def _ended(error: BaseException | None) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the loop was interrupted"
    return f"the loop ended with {described(error)}" if isinstance(error, Exception) else "the loop ended"
