"""Recorder of the forward passes of an unedited script that does not train: generation, denoising or evaluation.

Until the first backward pass or optimizer step of the script, the calls of its root modules are counted: modules with
parameters that no other module calls. From a few calls of the same one on, the calls are recorded; a step lasts from
one call of the root module to its next one. Where several are called in turns, such as an encoder and a decoder, the
one that was called first begins the step.

A script may evaluate before it trains. So the records are kept in memory until the script ends, and a backward pass or
an optimizer's step drops them with all that the recording has begun.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cs_systems.analysis.comparison.loop_findings import OTHER
from cs_systems.core.caveats import caveat
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced, untraced
from cs_systems.instrument.parameters import first_parameter
from cs_systems.measure.recorder import hooks
from cs_systems.measure.recorder.guard import Guest, as_guest
from cs_systems.measure.recorder.observers import Observer
from cs_systems.measure.recorder.other_threads import OtherThreads
from cs_systems.measure.recorder.phases import FORWARD
from cs_systems.measure.recorder.recorder import Recorder
from cs_systems.measure.recorder.stacks import is_own
from cs_systems.measure.recorder.stages import Stage
from cs_systems.measure.recorder.threads import Threads
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.recorder.watch import Watch
from cs_systems.measure.recorder.writing import Writer
from cs_systems.record import RunRecord

FIRST_CALL = 9  # call of the same root module with which the recording begins
CALLS_OF_ROOT = 3  # fewest calls, by then, of the module that begins a step
OTHER_LOOP_CALLS = 8  # more calls of another module without one of the root module are a loop of their own
MOST_KNOWN = 256  # modules with counted calls
# words of a program that may train; an evaluation before it must not end the script, or use a tracer of the process
TRAINS = re.compile(rb"\bbackward\b|\boptim\b|[Oo]ptimizer|Trainer\b|\.fit\(|\.train\(|\bautograd\b")


class _HeldWriter(Writer):
    """Writer that keeps its records in memory until they are released."""

    _is_released = False

    def append(self, record: RunRecord) -> None:
        if self._is_released:
            super().append(record)

    def release(self) -> None:
        """Write the records."""
        self._is_released = True
        for record in self.records:
            if not self.is_left_to_parent(record):
                self.append(record)

    def drop(self) -> None:
        """Forget the records, and remove what the profilers wrote."""
        for record in self.records:
            for file in {*record.artifacts.values()}:
                (self.out / file).unlink(missing_ok=True)
        self.records.clear()


class ForwardRecorder(Recorder):
    """Recorder of the steps that begin with a call of the same root module.

    Args:
        root: the module.
        stop: raise SystemExit(0) in the script after its last recorded step, and after the sampled ones.
        waits_for_nsys: as for a `ScriptRecorder`.
    """

    _is_in_code = False
    _writer_class = _HeldWriter
    _writer: _HeldWriter
    is_abandoned = False  # to be abandoned at the next call, because an optimizer has stepped

    def __init__(self, root: nn.Module, *, stop: bool, waits_for_nsys: bool, **options: Any) -> None:
        self._waits_for_nsys, self._stop = waits_for_nsys, stop
        super().__init__(**{"stacks": not stop} | options)
        self._subject.models.append(root)
        self._root, self._is_root_called = weakref.ref(root), False
        self._found = 0
        self._others = Counter[int]()  # calls of other root modules since the last step began
        self._most_others = 0
        self._later = Observation()
        self._called_with_gradients = False

    def _install(self, tracker: Tracker) -> None:
        tracker.idle, tracker.distinguishes_gradients = OTHER, False
        tracker.start()
        self._watch.is_inference = True
        hooks.observe(self._installed, tracker, (), trains=False)
        self._installed.add(functools.partial(hooks.patch_call, self._calls))

    def _used(self, every: Sequence[Observer]) -> list[Observer]:
        """Return the observers of a loop without gradients."""
        return [each for each in every if isinstance(each, (Watch, Threads, OtherThreads))]

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return FORWARD for the outermost call of a module with parameters; end the step before the root module's."""
        tracker, module = self._tracker, args[0]
        if self.is_abandoned:
            self.abandon()
        if self._tracker is None or tracker is None or tracker.is_open(FORWARD) or is_tracing():
            return None
        if first_parameter(module) is None:
            return None
        if module is self._root():
            self._root_is_called(tracker)
        else:
            self._other_is_called(module)
        if self._tracker is None:
            return None
        models = self._subject.models
        if all(module is not known for known in models):
            models.append(module)
        self._called_with_gradients |= torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return FORWARD

    def _root_is_called(self, tracker: Tracker) -> None:
        """End the step before this call of the root module, if there is one, and begin the next one."""
        self._most_others = max([self._most_others, *self._others.values()])
        self._others.clear()
        if not self._is_root_called:  # the recording has begun in the middle of a step
            self._is_root_called = True
            tracker.start()
            self._watch.step_ended()
            return
        self._watch.step_ended()
        self._count += 1
        self._take(tracker)
        self._found += 1
        if self._stop and self._is_last(self._found):
            raise SystemExit(0)

    def _other_is_called(self, module: nn.Module) -> None:
        """Record the loop of another root module instead, if the first one is called no more."""
        self._others[id(module)] += 1
        if self._others[id(module)] <= max(OTHER_LOOP_CALLS, self._most_others):
            return
        self._others.clear()
        if not self._stages[0].is_timed:
            self._as_own_time(self._give_up)
            return
        self._root, self._is_root_called = weakref.ref(module), True
        self._subject.models.clear()
        self._called_with_gradients, self._most_others, self._found = False, 0, 0
        self._begin_again()
        assert self._tracker is not None
        self._tracker.start()

    def _give_up(self) -> None:
        """End the profile of a loop that has ended."""
        self._end_stage("the first loop ended", None)
        self._begin_stage()

    def _off(self) -> None:
        super()._off()
        if not self._stop:  # the whole loop is watched
            self._later.add(functools.partial(hooks.report_calls, self._called_later, lambda *_: None))

    @untraced
    def _called_later(self, module: nn.Module, _: Any) -> None:
        if module is self._root() and threading.get_ident() == self._watched_thread and not is_tracing():
            self._watch.step_ended()

    def _begin(self) -> None:
        self._watched_thread = threading.get_ident()
        super()._begin()

    def _record(self, stage: Stage, ended: str | None, error: BaseException | None) -> RunRecord:
        record = super()._record(stage, ended, error)
        if record.status != "ok":
            return record
        root = self._root()
        name = "the same module" if root is None else type(getattr(root, "_orig_mod", root)).__name__
        recorded = (
            "; autograd records it, which torch.inference_mode() leaves out" if self._called_with_gradients else ""
        )
        told = caveat("forward-only", f"no backward pass ran: a step is a call of {name}{recorded}")
        return replace(record, warnings=(*record.warnings, told))

    def _shorter(self, done: int) -> str:
        return f"--steps 1:{done}"

    def _without(self, stage: Stage) -> str:
        return "pass --with none"

    def close(self, error: BaseException | None = None) -> None:
        """End the recording, and write its records if a step was timed."""
        if self._state in ("new", "closed"):
            return
        self._later.close()
        super().close(error)
        self._later.close()
        if any(record.status == "ok" for record in self.records):
            self._writer.release()
        else:
            self._writer.drop()

    @untraced
    def abandon(self) -> None:
        """End the recording without a trace, because the script trains."""
        if self._state in ("new", "closed"):
            return
        atexit.unregister(self.close)
        if self._tracker is not None and self._region_is_open():
            stage = self._stages[0]
            self._leave_region()
            self._writer.remove_files(stage)
        if self._tracker is not None:
            self._off()
        self._later.close()
        self._watch.close()
        self._state = "closed"
        self._writer.drop()

    def _region_is_open(self) -> bool:
        stage = next(iter(self._stages), None)
        return stage is not None and stage.is_recorded and not stage.is_timed and self._waits_for is None

    @property
    def steps_begun(self) -> int:
        """Number of calls of the root module after the first one."""
        return self._found

    def give_way(self) -> None:
        self.abandon()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._later.close()


class ForwardLoop(Guest):
    """Search for a loop of forward passes in a script that has not trained yet.

    Args:
        record: makes the recorder of the loop of a root module.

    Attributes:
        recorder: the recorder, if a loop was found.
    """

    def __init__(self, record: Callable[[nn.Module], ForwardRecorder]) -> None:
        self._record = record
        self.recorder: ForwardRecorder | None = None
        self._most_calls = 0
        self._process, self._thread = os.getpid(), threading.main_thread().ident
        self._known: dict[int, tuple[weakref.ref[nn.Module], int]] = {}  # in the order of their first calls
        self._is_inside = self._is_over = self._has_trained = False
        self._observation = Observation()
        # The observation of the compiler imports it, so it begins only where a script calls or compiles something.
        call = nn.Module.__call__
        self._waiting: list[Undo] = [
            replaced(nn.Module, "__call__", hooks.ModuleCall(call, self._first_call(call))),
            hooks.after(torch, "compile", lambda *_, **__: self._begin()),
        ]

    def _first_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of modules that begins to count the calls, with this one."""

        @passed_through
        @functools.wraps(call)
        def first_call(*args: Any, **kwargs: Any) -> Any:
            return (nn.Module.__call__ if self._begin() else call)(*args, **kwargs)

        return first_call

    @as_guest
    def _begin(self) -> bool:
        """Count the calls from now on, in place of waiting for the first one; return whether this one counts too."""
        waiting, self._waiting = self._waiting, []
        is_restored = False not in [undo() for undo in reversed(waiting)]
        if not waiting or self._is_over or os.getpid() != self._process:
            return False
        self._observation.add(self._count_calls)
        self._observation.add(lambda: register_optimizer_step_pre_hook(self._optimizer_steps).remove, is_guarded=True)
        return is_restored

    def _count_calls(self) -> Undo:
        """Count the calls of root modules in the main thread; return a function that ends this."""
        call = nn.Module.__call__

        @passed_through
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self._enters(args[0]):
                return call(*args, **kwargs)
            try:
                return (nn.Module.__call__ if self._begins(args[0]) else call)(*args, **kwargs)
            finally:
                self._is_inside = False

        self._counting = hooks.ModuleCall(call, counted)
        return replaced(nn.Module, "__call__", self._counting)

    @as_guest
    def _enters(self, module: nn.Module) -> bool:
        """Return whether this is the call of a root module, before the recording."""
        if self._is_inside or self._is_over or threading.get_ident() != self._thread or is_tracing():
            return False
        if not _computes(first_parameter(module)):
            return False
        self._is_inside = True
        return True

    @as_guest
    def _begins(self, module: nn.Module) -> bool:
        """Count a call of a root module, and begin the recording with one; return whether it observes this call."""
        reference, calls = self._known.get(id(module), (weakref.ref(module), 0))
        if reference() is not module:
            self._known.pop(id(module))
            reference, calls = weakref.ref(module), 0
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known[id(module)] = reference, calls + 1
        self._most_calls = max(self._most_calls, calls + 1)
        if calls + 1 < FIRST_CALL:
            return False
        is_uncovered = vars(nn.Module)["__call__"] is self._counting
        self._end_search()
        if hooks.is_active() or os.getpid() != self._process:
            return False
        known = (reference() for reference, calls in self._known.values() if calls >= CALLS_OF_ROOT)
        root = next((each for each in known if each is not None), module)  # a module may be false by its length
        self.recorder = self._record(root)
        self.recorder.__enter__()
        return is_uncovered

    @as_guest
    def _optimizer_steps(self, *_: Any) -> None:
        """Note that the script trains; hooks cannot be removed from inside a hook."""
        self._is_over = self._has_trained = True
        if self.recorder is not None:
            self.recorder.is_abandoned = True

    def fail(self, error: Exception) -> None:
        super().fail(error)
        with suppress(Exception):
            self.abandon()

    def _remove(self) -> None:
        self._is_over = True
        while self._waiting:
            self._waiting.pop()()
        self._observation.close()

    def _end_search(self) -> None:
        """Remove what counts the calls; an optimizer's step is still noted."""
        self._remove()
        self._observation.add(lambda: register_optimizer_step_pre_hook(self._optimizer_steps).remove, is_guarded=True)

    @property
    def too_few_calls(self) -> int:
        """Number of calls of a root module that were no loop to record; 0 if another reason left no record."""
        if self.recorder is not None:
            return 0 if self.recorder.records else self._most_calls + self.recorder.steps_begun
        return self._most_calls if self._most_calls < FIRST_CALL and not self._has_trained else 0

    @untraced
    def abandon(self) -> None:
        """End the search, and the recording without a trace, because the script trains."""
        self._has_trained = True
        self._remove()
        if self.recorder is not None:
            self.recorder.abandon()
            self.recorder = None

    def close(self, error: BaseException | None = None) -> None:
        """End the search or the recording, and write the records."""
        self._remove()
        if self.recorder is not None and self.recorder.is_abandoned:
            self.abandon()
        elif self.recorder is not None:
            self.recorder.close(error)


def may_train() -> bool:
    """Return whether the text of the program, in the files of its own modules, has a word of a training."""
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    own = (Path(file) for file in files if isinstance(file, str) and file.endswith(".py") and is_own(file))
    return any(TRAINS.search(_bytes_of(file)) for file in own)


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@untraced
def _computes(parameter: torch.Tensor | None) -> bool:
    """Return whether a module with this parameter computes numbers now: not shapes alone, or into a CUDA graph."""
    if parameter is None or isinstance(parameter, FakeTensor):
        return False
    kind = parameter.device.type
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_current_stream_capturing())
