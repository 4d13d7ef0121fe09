"""Recorder of an unedited script: it finds the models, and counts the optimizers' steps as steps of the loop.

Nothing happens before the first backward pass, which shows that there is a loop and on which device. A step ends when
the optimizer that stepped first has stepped again: the other optimizers of an iteration belong to the same step. If the
first one steps several times per step of another, as a GAN's critic may, a caveat says that the steps differ. If an
optimizer keeps stepping without the first one, it trains something else, which is recorded instead of the first. A new
one of the same class and parameters takes the first one's place. If a script updates its parameters itself, or its
optimizer runs inside a compiled function, a step ends with a backward pass; if that was captured into a CUDA graph,
with the replay. A model is a module with parameters that no other module calls.

On request, the forward passes of a script without a backward pass are recorded: see `forward_loop`.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs_systems.analysis.comparison.loop_findings import NEVER_STEPPED, OTHER, NeverSteppedRow, UnsampledRow
from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.instrument.compiler import Observation, is_tracing, passed_through, replaced, untraced
from cs_systems.instrument.parameters import first_parameter
from cs_systems.measure.recorder import _ranks, hooks
from cs_systems.measure.recorder.forward_loop import ForwardLoop, ForwardRecorder, may_train
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.inputs import StepInputs
from cs_systems.measure.recorder.never_stepped import NeverStepped
from cs_systems.measure.recorder.own_tools import OwnTools
from cs_systems.measure.recorder.phases import BACKWARD, FORWARD, Call, Cut
from cs_systems.measure.recorder.recorder import Recorder
from cs_systems.measure.recorder.recording import described
from cs_systems.measure.recorder.stages import AUTO, PROFILES, Stage, Taken
from cs_systems.measure.recorder.subject import parameters_of
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.recorder.writing import with_caveat
from cs_systems.record import RunRecord

# Another optimizer trains something else if it makes more steps than this after the first one's last step, and more
# than the first one ever made; after the timed steps, as many as that one, as do folds of a cross-validation. If the
# loop has ended, more than it ever made between two steps of the first one. A GAN's critic makes about five per step of
# the generator.
OTHER_TRAINING_STEPS = 8
EAGER_STEPS = 4  # steps of an optimizer after which it is not compiled; a compiled one's hooks run in its compilation


class _Key(NamedTuple):
    """Optimizer in counts, also after its end."""

    name: str  # of its class
    number: int  # in the order of the first steps


class _Since(NamedTuple):
    """Step of another optimizer after the last step of the first one."""

    optimizer: weakref.ref[Optimizer]
    key: _Key
    cut: Cut
    compilations: tuple[int, float]
    calls: Counter[Call]


def leave_others_idle() -> None:
    """Let each Recorder that the script makes itself record and write nothing, as if its recording were over.

    For trials of advise, which record the process from outside.
    """
    enters, leaves, closes = Recorder.__enter__, Recorder.__exit__, Recorder.close

    def enter(self: Recorder) -> Recorder:
        if isinstance(self, ScriptRecorder):
            return enters(self)
        self._state = "done"
        return self

    def leave(self: Recorder, *error: Any) -> None:
        leaves(self, *error) if isinstance(self, ScriptRecorder) else close(self)

    def close(self: Recorder, error: BaseException | None = None) -> None:
        if isinstance(self, ScriptRecorder):
            closes(self, error)
        else:
            self._state = "closed"

    for name, function in (("__enter__", enter), ("__exit__", leave), ("close", close)):
        setattr(Recorder, name, function)


class ScriptRecorder(Recorder):
    """Recorder that begins by itself and finds the steps; it accepts the other options of `Recorder`.

    Args:
        name: the name of the loop in tables.
        stop: raise SystemExit(0) in the script after its last recorded step, at the same step on every rank; with
            stacks=True after the steps in which the stack was sampled, whose number differs between ranks.
        waits_for_nsys: keep the record of an nsys profile only in `records`, because its report does not exist yet.
        forward: record a loop of forward passes if the script trains nothing; not among several ranks.
    """

    _is_in_code = False

    def __init__(
        self, name: str, *, stop: bool = False, waits_for_nsys: bool = False, forward: bool = False, **options: Any
    ) -> None:
        self._name, self._stop, self._options = name, stop, options
        self._waits_for_nsys = waits_for_nsys
        self._first: weakref.ref[Optimizer] | None = None
        self._first_class: type[Optimizer] | None = None
        self._first_parameters: list[weakref.ref[torch.Tensor]] = []
        self._latest: weakref.ref[Optimizer] | None = None  # optimizer that stepped last, until a GradScaler returns
        # optimizer → number of steps found before its latest one
        self._stepped_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._seen_to_step = 0  # steps of optimizers while each backward pass counts as a step
        self._most_between = 1  # steps found between two steps of another optimizer
        self._since: list[_Since] = []
        self._most_since = 0  # steps of one other optimizer between two steps of the first one
        self._between: weakref.WeakSet[Optimizer] = (
            weakref.WeakSet()
        )  # optimizers that stepped between two of its steps
        self._keys: weakref.WeakKeyDictionary[Optimizer, _Key] = weakref.WeakKeyDictionary()
        self._next_key = itertools.count()
        self._captures_step = False  # an optimizer stepped while a CUDA graph was being captured
        self._step_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._later, self._counting = Counter[_Key](), Observation()
        self._recorded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._found, self._finding = 0, Observation()
        self._never_stepped = NeverStepped()
        self.records = []
        self.failure: str | None = None
        self._state = "new"
        self._early_tools = OwnTools()
        self._early_tools.watch()  # also before the first backward pass
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward
        self._process = os.getpid()

        @passed_through
        def first_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            # A fork of the process is not recorded. Wrappers that the script puts around this function call it in every
            # pass.
            is_first = self._state == "new" and os.getpid() == self._process
            if not is_first or not _computes(roots[0]):
                return engine(roots, *args, **kwargs)
            is_inside = autograd._engine_run_backward is not waiting
            end_waiting()
            if self._forward is not None:
                self._forward.abandon()
            self._begin_recording(roots[0])
            run = engine if is_inside else autograd._engine_run_backward  # by now the observed function
            return run(roots, *args, **kwargs)

        self._forward = ForwardLoop(self._forward_recorder) if forward and _ranks.world_size() == 1 else None
        self._is_kept_running = self._is_unprofiled = False  # because the script may train after its forward passes
        self._optimizers: list[weakref.ref[Optimizer]] = []
        wait_no_more = replaced(autograd, "_engine_run_backward", first_backward)
        waiting = autograd._engine_run_backward
        know_no_more = hooks.after(
            Optimizer, "__init__", lambda new, *_, **__: self._optimizers.append(weakref.ref(new))
        )

        @untraced
        def end_waiting() -> None:
            wait_no_more()
            know_no_more()

        self._end_waiting = end_waiting

    @untraced
    def _begin_recording(self, root: Any) -> None:
        """Begin to record, in place of entering a `with` block; if that fails, the script continues."""
        device = root.device if isinstance(root, torch.Tensor) else None
        try:
            super().__init__(name=self._name, device=device, **{"stacks": not self._stop} | self._options)
            self.__enter__()
        except Exception as error:
            self._state, self.failure = "closed", str(error)

    def _forward_recorder(self, root: nn.Module) -> ForwardRecorder:
        """Return the recorder of a loop of forward passes, which leaves to a later training what that needs."""
        device = next(nn.Module.parameters(root)).device
        options, trains = self._options | {"name": self._name, "device": device}, may_train()
        on_gpu = device.type == "cuda"
        is_profiled = options.get("profile") not in (("none",) if on_gpu else ("none", AUTO)) or options.get("snapshot")
        if trains and is_profiled:  # a process has one capture of nsys, and torch.profiler changes later times
            self._is_unprofiled = True
            options |= {"profile": "none", "snapshot": False}
        self._is_kept_running = self._stop and trains
        stop = self._stop and not trains
        return ForwardRecorder(root, stop=stop, waits_for_nsys=self._waits_for_nsys, **options)

    @property
    def forward_calls(self) -> int:
        """Number of calls of a model that were no loop to record; 0 if another reason left no record."""
        return 0 if self._forward is None or self._state != "new" else self._forward.too_few_calls

    def _install(self, tracker: Tracker) -> None:
        self._find_steps(self._finding if self._stop else self._installed)  # after a stop, no later steps are counted
        super()._install(tracker)
        tracker.idle = OTHER  # the start of an iteration is unknown
        tracker.start()
        self._installed.add(partial(hooks.patch_call, self._calls))

    def _watched_tools(self) -> OwnTools:
        return self._early_tools

    def _find_steps(self, finding: Observation) -> None:
        """Observe the events that end a step."""
        self._optimizers += [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), Optimizer)]
        self._ends_with_backward = not self._optimizers
        finding.add(lambda: register_optimizer_step_post_hook(as_guest(self._stepped)).remove, is_guarded=True)
        finding.add(partial(hooks.after, GradScaler, "step", self._scaler_stepped))
        finding.add(partial(hooks.after, torch.autograd, "_engine_run_backward", self._backward_ended))
        if torch.cuda.is_available():
            finding.add(partial(hooks.after, torch.cuda.CUDAGraph, "capture_end", self._captured))
            finding.add(partial(hooks.after, torch.cuda.CUDAGraph, "replay", self._replayed))

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return FORWARD for the outermost call of a module with parameters that is not inside a backward pass."""
        tracker, module = self._tracker, args[0]
        if tracker is None or tracker.is_open(FORWARD, BACKWARD) or first_parameter(module) is None:
            return None
        models = self._subject.models
        if all(module is not known for known in models):
            models.append(module)
        return FORWARD

    @untraced
    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        tracker = self._tracker
        if tracker is not None:
            if not tracker.observes():
                self._captures_step |= tracker.captures()
                return
            if self._ends_with_backward and self._optimizers:  # the optimizer also steps inside a compiled function
                self._seen_to_step += 1
                if self._seen_to_step < EAGER_STEPS:
                    return
            # the optimizer was made after the first backward pass, so the loop only begins here
            if self._ends_with_backward:
                self._ends_with_backward = False
                self._begin_again()
            if self._first is None or self._is_successor(optimizer):
                self._begin_with(optimizer)
            self._know(optimizer)
            before, self._stepped_at[optimizer] = self._stepped_at.get(optimizer, self._found), self._found
            self._most_between = max(self._most_between, self._found - before)
        self._latest = weakref.ref(optimizer)
        if self._first is not None and self._first() is optimizer:
            self._iterated()
        elif tracker is not None:
            self._other_stepped(tracker, optimizer)

    def _begin_again(self) -> None:
        self._found = 0
        super()._begin_again()

    def _begin_with(self, optimizer: Optimizer) -> None:
        """Let the steps of this optimizer end the loop's steps, in place of an earlier one's."""
        earlier = self._first() if self._first is not None else None
        self._subject.optimizers = [each for each in self._subject.optimizers if each is not earlier]
        self._first, self._first_class = weakref.ref(optimizer), type(optimizer)
        self._first_parameters = [weakref.ref(p) for p in parameters_of(optimizer)]

    def _is_successor(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer that has not stepped before is of the first one's class and parameters."""
        if optimizer in self._stepped_at or type(optimizer) is not self._first_class:
            return False
        before, now = self._first_parameters, parameters_of(optimizer)
        return len(before) == len(now) and all(p() is each for p, each in zip(before, now, strict=True))

    def _know(self, optimizer: Optimizer) -> None:
        known = self._subject.optimizers
        if all(optimizer is not each for each in known):
            known.append(optimizer)

    def _other_stepped(self, tracker: Tracker, optimizer: Optimizer) -> None:
        """Note the step of an optimizer other than the first; record it instead if it trains something else."""
        cut = tracker.timeline.cut()
        key, compilations = self._key(optimizer), self._probes.compilations()
        self._since.append(_Since(weakref.ref(optimizer), key, cut, compilations, tracker.calls))
        tracker.calls = Counter()
        steps = sum(each.optimizer() is optimizer for each in self._since)
        if not self._stages[0].is_timed:
            if steps >= max(OTHER_TRAINING_STEPS + 1, self._found):
                self._soon(tracker, self._give_up)
        elif steps > max(OTHER_TRAINING_STEPS, self._found):
            self._follow(tracker, optimizer)

    def _give_up(self) -> None:
        """End the profile of a training that has ended."""
        self._count_as_later()
        self._end_stage("the first training ended", None)
        self._begin_stage()

    def _count_as_later(self) -> None:
        """Count the steps after the first optimizer's last one as those of later trainings, which are not recorded.

        An optimizer that stepped between two of its steps, such as a GAN's critic, stays one of the loop.
        """
        later = {each for one in self._since if (each := one.optimizer()) is not None} - {*self._between}
        of = self._subject
        of.optimizers = [optimizer for optimizer in of.optimizers if optimizer not in later]
        of_loop = {p for optimizer in of.optimizers for p in parameters_of(optimizer)}
        trained = {p for optimizer in later for p in parameters_of(optimizer)} - of_loop
        of.models = [model for model in of.models if trained.isdisjoint(model.parameters())]
        self._later.update(self._steps_since())
        self._since.clear()

    def _steps_since(self) -> Counter[_Key]:
        """Return the number of steps of each other optimizer after the first one's last step."""
        return Counter(each.key for each in self._since)

    def _key(self, optimizer: Optimizer) -> _Key:
        if optimizer not in self._keys:
            self._keys[optimizer] = _Key(type(optimizer).__name__, next(self._next_key))
        return self._keys[optimizer]

    def _follow(self, tracker: Tracker, optimizer: Optimizer) -> None:
        """Record the training of another optimizer, from its first step on, instead of the previous training."""
        optimizers = [known for each in self._since if (known := each.optimizer()) is not None]
        trained = {p for each in optimizers for p in parameters_of(each)}
        of = self._subject
        of.models = [model for model in of.models if not trained.isdisjoint(model.parameters())]
        self._begin_with(optimizer)
        of.optimizers = list(dict.fromkeys(optimizers))
        self._most_between = 1
        self._stepped_at.clear()
        self._between.clear()
        self._begin_again()
        calls, steps = Counter[Call](), list[tuple[_Since, Counter[Call]]]()
        for each in self._since:
            calls += each.calls
            if each.optimizer() is optimizer:
                steps.append((each, calls))
                calls = Counter()
        self._since.clear()
        timelines = tracker.timeline.pieces([each.cut for each, _ in steps])
        for timeline, (each, called) in zip(timelines, steps, strict=True):
            taken = Taken(timeline, *each.compilations, StepInputs(called, None))
            (self._warm if len(self._warm) < self._stages[0].warmup else self._timed).append(taken)
            self._found = self._count = self._count + 1
            if len(self._timed) == self._stages[0].steps:
                self._complete(tracker)
                self._stop_after_last()
                return
        self._observers.begin(self._stages[0].period(len(self._warm)))
        tracker.start()

    def _scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Count a step that a GradScaler skipped because a gradient was not finite."""
        if self._latest is None or self._latest() is not optimizer:
            self._stepped(optimizer)
        self._latest = None

    def _backward_ended(self, *args: Any, **options: Any) -> None:
        """Record a step if no optimizer was seen to end one, because it may run inside a compiled function."""
        tracker = self._tracker
        if tracker is not None and not tracker.observes():
            return
        is_differentiated = len(args) > 3 and args[3]  # in a second backward pass of the same step
        if is_differentiated or (tracker is not None and tracker.depth(BACKWARD) > 1):
            return
        if not self._ends_with_backward and self._first is None:
            known = {each for reference in self._optimizers if (each := reference()) is not None}
            self._ends_with_backward = self._updates.are_new(known) and not _in_optimizer_step()
            if tracker is not None and not self._ends_with_backward and options.get("accumulate_grad", True):
                with tracker.unobserved(), hidden_from_modes(), torch.no_grad():
                    self._never_stepped.backward_ended(args[0], known, self._subject.models)
        if self._ends_with_backward:
            self._iterated()

    def _captured(self, graph: Any, *_: Any, **__: Any) -> None:
        if self._captures_step:
            self._step_graphs.add(graph)
            self._captures_step = False

    def _replayed(self, graph: Any, *_: Any, **__: Any) -> None:
        if graph in self._step_graphs:
            self._iterated()

    def _iterated(self) -> None:
        """Record the step that ends here. Raises SystemExit after the last step if the script is to end."""
        self._watch.step_ended()
        if self._tracker is not None:
            self._count += 1
            if self._since:
                self._most_since = max(self._most_since, *self._steps_since().values())
                self._between.update(known for each in self._since if (known := each.optimizer()) is not None)
                self._tracker.calls = sum((each.calls for each in self._since), self._tracker.calls)
                self._since.clear()
            self._take(self._tracker)
        self._found += 1
        self._stop_after_last()

    def _stop_after_last(self) -> None:
        if self._stop and self._is_last(self._found):
            self._finding.close()  # the exception ends the loop over the hooks, so they can be removed
            raise SystemExit(0)

    def _soon(self, tracker: Tracker, call: Callable[[], object]) -> None:
        """Call the function at the next phase or at the end, because hooks cannot be removed from inside a hook."""
        tracker.before_next = partial(self._as_own_time, call)

    def _off(self) -> None:
        self._recorded = weakref.WeakSet(self._subject.optimizers)
        super()._off()
        if not self._stop:
            self._loaded.observe(self._counting)
            self._counting.add(lambda: register_optimizer_step_post_hook(self._stepped_later).remove, is_guarded=True)

    @untraced
    def _stepped_later(self, optimizer: Optimizer, *_: Any) -> None:
        if self._first is not None and self._first() is optimizer:
            self._found += 1
            self._watch.step_ended()
            self._observers.step_later(optimizer)
        elif optimizer not in self._recorded:
            self._later[self._key(optimizer)] += 1

    def steps_done(self) -> int | None:
        """Return the number of steps of the loop so far; None if its later steps are not counted."""
        is_counted = self._state != "new" and not self._later and (self._tracker is not None or self._first is not None)
        return self._found if is_counted else None

    def later_training(self) -> str | None:
        """Return a message with a remedy if another optimizer trained after the recorded steps, else None.

        Of a loop of forward passes: what was left out, because the script may train after it.
        """
        left = ["--stop did not end it"] * self._is_kept_running + ["no profiler was started"] * self._is_unprofiled
        if self._state == "new" and left and self.records:
            remedy = "name its loop with a Recorder if it does not"
            return f"the text of the script has words of a training, so {' and '.join(left)}; {remedy}"
        trainings = Counter[str]()
        for key, steps in self._later.items():
            if steps > OTHER_TRAINING_STEPS:
                trainings[key.name] += steps
        if not trainings:
            return None
        name, steps = trainings.most_common(1)[0]
        remedy = (
            "to record that training, write `with cs_systems.Recorder(out='runs/mine') as recorder:` around its loop"
        )
        return f"another optimizer, {name}, stepped {steps} times after the recorded steps; {remedy}"

    def close(self, error: BaseException | None = None) -> None:
        if self._state != "new" and self._tracker is not None:
            self._tracker.call_before_next()
        if max(self._steps_since().values(), default=0) > max(OTHER_TRAINING_STEPS, self._most_since):
            self._count_as_later()
        if self._state == "new":
            self._end_waiting()
        super().close(error)
        self._finding.close()
        self._counting.close()
        if self._forward is not None and self._state == "new":
            self._forward.close(error)
            if self._forward.recorder is not None:
                self.records = self._forward.recorder.records
            elif (failure := self._forward.failure) is not None:
                self.failure = f"the recording of its forward passes ended with {described(failure)}"

    def _record(self, stage: Stage, ended: str | None, error: BaseException | None) -> RunRecord:
        record = super()._record(stage, ended, error)
        if record.status == "error" and (rows := self._without_steps(error)):
            return replace(record, results={**record.results, **NEVER_STEPPED.filled(rows)})
        if record.status == "ok" and not self._subject.optimizers:
            seen = "was seen to step, because it runs inside a compiled function" if self._optimizers else "stepped"
            what = f"no optimizer {seen}: a step is one backward pass"
            return with_caveat(record, Caveat("no-optimizer", what, REMEDIES["no-optimizer"]))
        if record.status != "ok" or self._most_between == 1:
            return record
        what = f"one optimizer steps up to {self._most_between} times for a step of another, and each is a step here"
        kept = (caveat for caveat in record.warnings if caveat.code != "unstable")  # the steps differ in kind
        return replace(record, warnings=(*kept, Caveat("mixed-steps", what, REMEDIES["mixed-steps"])))

    def _without_steps(self, error: BaseException | None) -> Sequence[NeverSteppedRow]:
        """Return the row of the backward passes of a script that ended by itself without a step of an optimizer."""
        is_by_itself = error is None or (isinstance(error, SystemExit) and not error.code)
        return self._never_stepped.rows() if is_by_itself and not self._found else ()

    def _when_ended(self, stage: Stage) -> str:
        return super()._when_ended(stage) if self._found else "before an optimizer stepped"

    def _remedy(self, stage: Stage, error: BaseException | None) -> str:
        if self._found or isinstance(error, Exception):
            return super()._remedy(stage, error)
        if self._without_steps(error):
            return "call step() of an optimizer after the backward passes, or let it run longer"
        return f"let it run longer, or, if it updates its parameters itself, {REMEDIES['no-optimizer']}"

    def _why_unsampled(self) -> UnsampledRow:
        if not self._stop or self._has_stacks or self._found < self._all_steps:
            return super()._why_unsampled()
        # ab and advise end it, too, where nobody gave --stop
        reason = "the script was ended after its last recorded step, before its stack was sampled"
        return {"reason": reason, "remedy": "use cs-systems run without --stop"}

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._finding.close()
        self._counting.close()

    def _shorter(self, done: int) -> str:
        return f"--steps 1:{done}"

    def _without(self, stage: Stage) -> str:
        return "leave out --snapshot and memory in --with" if stage.name not in PROFILES else "pass --with none"


def _in_optimizer_step() -> bool:
    """Return whether an optimizer's step is running, such as one that began before the observation."""
    frame, file = inspect.currentframe(), inspect.getfile(Optimizer)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


@untraced
def _computes(root: Any) -> bool:
    """Return whether a backward pass from this root computes numbers: not on the meta device or in tracing."""
    if not isinstance(root, torch.Tensor):
        return not is_tracing()
    return root.device.type in ("cpu", "cuda") and not isinstance(root, FakeTensor) and not is_tracing()
