"""State of a recorded loop while it runs: its open phases, and the boundaries in the step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import BETWEEN, HOST_SYNC, OTHER
from cs_systems.instrument.annotate import STEP, Label, OpenLabel, annotate
from cs_systems.instrument.compiler import is_tracing, untraced
from cs_systems.machine.device import Device
from cs_systems.measure.recorder.guard import Guest
from cs_systems.measure.recorder.observers import EnginePass, ModelCall, Observers
from cs_systems.measure.recorder.phases import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    Call,
    Clocks,
    Moment,
    Timeline,
    call_of,
)

_NO_THREAD = -1


class _Annotations:
    """Ranges for the currently active profiler."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, name: str) -> None:
        context = annotate(name)
        context.__enter__()
        self._open.append(context)

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _engine_pass(arguments: Sequence[Any], result: Any) -> EnginePass:
    """Return the pass of autograd's engine with these arguments: roots, their gradients, two flags, and the inputs."""
    if len(arguments) < 5:
        return EnginePass((), (), (), ())  # a call in another form
    roots, weights, _, _, inputs, *_ = arguments
    return EnginePass(roots, weights, inputs, result if isinstance(result, tuple) else ())


class Tracker(Guest):
    """Current state of the loop: the open phases, and the timeline of the step.

    Only the thread that made it is observed.

    Attributes:
        is_cuda: the loop runs on a GPU.
        timeline: boundaries of this step.
        idle: the phase in which a step begins.
        stepped: the optimizer's phase began in this step.
        seen: all phases that have begun so far.
        calls: the number of calls of the models in this step by the result of `call_of`.
        iterators: the number of iterators that data loaders began in this step.
        starts_workers: one of them starts worker processes.
        collates_rows: data loaders have put all batches of this step together from single rows in memory; None without
            a batch.
        has_workers: a data loader with workers has given a batch so far.
        has_ranges: each phase is also a range of the active profiler.
        distinguishes_gradients: a forward pass that autograd does not record has a name of its own in samples of the
            stack.
        before_next: called once, before the next phase begins.
        observers: list of observers of the steps.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float],
        at_forward: Callable[[], object],
    ) -> None:
        self._device, self._clock = device, clock
        self._at_forward = at_forward  # called in the first forward
        self.is_cuda = device.is_cuda
        self._thread = threading.get_ident()
        self.idle = BETWEEN
        self._named: list[str] = []
        # Open phases: (found, shown, whether the loss was being computed before).
        self._found: list[tuple[str, str, bool]] = []
        self._in_loss = False
        self._is_without_gradients = False
        self._rest = BETWEEN
        self._ranges, self._label, self.has_ranges = _Annotations(), OpenLabel(), False
        self.seen: set[str] = set()
        self.calls: Counter[Call] = Counter()
        self.iterators, self.starts_workers = 0, False
        self.collates_rows: bool | None = None
        self.has_workers = False
        self.before_next: Callable[[], object] | None = None
        self.observers = Observers()
        self.distinguishes_gradients = True
        self.begin_stage()

    def begin_stage(self) -> None:
        """Begin a stage and its first step once the device is idle."""
        with self.unobserved():
            self._clocks = Clocks(self._device, self._clock)
        self.start()

    def end_stage(self) -> None:
        """Wait for the device; the times of the steps can be read afterwards."""
        with self.unobserved():
            self._clocks.end()

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Stop observing inside, so that synchronising the device does not count as the loop's synchronisation."""
        thread, self._thread = self._thread, _NO_THREAD
        try:
            yield
        finally:
            self._thread = thread

    def start(self) -> None:
        """Begin a new step now, and end phases that an exception has left open."""
        self._named.clear()
        self._found.clear()
        self._in_loss, self._rest, self.stepped = False, self.idle, False
        self.calls = Counter()
        self.iterators, self.starts_workers, self.collates_rows = 0, False, None
        self.timeline = Timeline(self._clocks, self.idle)
        self._label.switch((), self._ranges)
        self._show()

    def end(self, *, synchronize: bool) -> Timeline:
        """End the step, on request after waiting for the device, and return its boundaries."""
        self.timeline.end()
        if synchronize:
            with self.unobserved():
                self._device.synchronize()
        return self.timeline

    def moment(self) -> Moment:
        """Return the current phase; callable from any thread."""
        timeline = self.timeline
        return Moment(timeline, timeline.boundaries() - 1, self._is_without_gradients)

    def rest(self, name: str) -> None:
        """Set the name of time without an open phase from now on: OTHER or BETWEEN."""
        self._rest, self._in_loss = name, False
        self._switch()

    def observes(self) -> bool:
        """Return whether calls in this thread are observed now.

        Work that is captured into a CUDA graph does not run yet, and an event inside it has no time.
        """
        return self.is_here() and not self.captures()

    def is_here(self) -> bool:
        """Return whether this thread's calls are observed."""
        return threading.get_ident() == self._thread

    def is_paused(self) -> bool:
        """Return whether no thread's calls are observed, as during the looks of observers."""
        return self._thread == _NO_THREAD

    def captures(self) -> bool:
        """Return whether work is being captured into a CUDA graph now."""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def fail(self, error: Exception) -> None:
        """Stop observing after an error of the observation, so that the program continues unobserved."""
        super().fail(error)
        self._thread = _NO_THREAD

    def is_open(self, *names: str) -> bool:
        """Return whether one of these phases was entered and has not ended."""
        return any(found in names for found, *_ in self._found)

    def depth(self, name: str) -> int:
        """Return how many phases of this name are open inside each other."""
        return sum(found == name for found, *_ in self._found)

    def enter(self, name: str, arguments: Any = ()) -> None:
        """Begin a phase that a hook found; the caller checks `observes` first.

        A forward pass inside a backward pass is a recomputation for torch.utils.checkpoint, and belongs to backward.

        arguments: the positional and named arguments of the call; for a model, the model comes first. A model's input
        shapes are counted, without waiting for the device.
        """
        if self.before_next is not None:
            self.call_before_next()
        shown = name
        if name == FORWARD:
            repeats = self.is_open(BACKWARD)
            if not (repeats or self.is_open(FORWARD) or is_tracing()):
                self._call_begins(arguments)
            if FORWARD not in self.seen:
                self._at_forward()
            shown = BACKWARD if repeats else FORWARD
        elif name == BACKWARD and not self.is_open(BACKWARD):
            self.observers.backward_begins(arguments[0][0])
        if name == HOST_SYNC and self.observers.is_looking:
            self.observers.wait_begins()
        self.seen.add(shown)
        self.stepped |= name == OPTIMIZER
        self._found.append((name, shown, self._in_loss))
        self._in_loss = False
        self._switch()

    def _call_begins(self, arguments: Any) -> None:
        call = call_of(arguments)
        self.calls[call] += 1
        self._is_without_gradients = self.distinguishes_gradients and not call[0]
        if self.observers.is_looking:
            number = self.calls.total()
            self.observers.call_begins(ModelCall(arguments, call[0], self.is_open(OPTIMIZER), number))

    def call_before_next(self) -> None:
        """Call `before_next` once, if set, even if it begins a phase itself by waiting for the device."""
        call, self.before_next = self.before_next, None
        if call is not None:
            call()

    def exit(
        self, name: str, *, is_differentiable: bool = False, result: Any = None, arguments: Sequence[Any] = ()
    ) -> None:
        """End the phase that `enter` began, if an exception has not ended it before.

        is_differentiable: backward made a graph of the gradients, as for a gradient penalty, so it is part of the loss.
        result: the result of a model's call, or of a pass of autograd's engine. arguments: those of such a pass.
        """
        if not (self._found and self._found[-1][0] == name) and not self.is_open(name):
            return
        while self._found:  # an exception may have left inner phases open
            found, shown, was_in_loss = self._found.pop()
            if found == name:
                break
        ends_loss = shown == OPTIMIZER or (shown == BACKWARD and not is_differentiable)
        self._in_loss = (shown == FORWARD and not self.is_open(FORWARD)) or (was_in_loss and not ends_loss)
        self._switch()
        if self.observers.is_looking and not self.is_open(shown):
            if shown == FORWARD:
                self.observers.call_ends(result, self.is_open(OPTIMIZER))
            elif name == BACKWARD:
                self.observers.backward_ends(_engine_pass(arguments, result))

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Begin the phase of an optimizer's step."""
        self.enter(OPTIMIZER)
        if self.observers.is_looking:
            self.observers.update_begins(optimizer)

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """End the phase of an optimizer's step."""
        if self.observers.is_looking:
            self.observers.update_ends(optimizer)
        self.exit(OPTIMIZER)

    @untraced
    def enter_named(self, name: str) -> None:
        if self.observes():
            self._named.append(name)
            self._switch()

    @untraced
    def exit_named(self, name: str) -> None:
        if self.observes() and name in self._named:
            while self._named.pop() != name:
                pass
            self._switch()

    def _switch(self) -> None:
        self.timeline.begin(self._named[-1] if self._named else self._innermost())
        self._show()

    def _innermost(self) -> str:
        if self._in_loss:
            return LOSS
        return self._found[-1][1] if self._found else self._rest

    def _show(self) -> None:
        """Open the ranges of the open phases, if a profiler is active."""
        if self.has_ranges:
            found = self._innermost()
            label: Label = (STEP, *self._named[-1:], *(() if found in (OTHER, BETWEEN) else (found,)))
            self._label.switch(label, self._ranges)

    def close_ranges(self) -> None:
        self.has_ranges = False
        self._label.switch((), self._ranges)
