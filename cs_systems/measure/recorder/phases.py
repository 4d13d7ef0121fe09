"""Phases of a training loop: their names, and the boundaries between them in one step.

The time of a step is cut at boundaries, and each piece belongs to one phase: the innermost open one. A phase inside
another interrupts it, so the phases of a step add up to the step. A phase that the user named is not interrupted by
phases that hooks find.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import BETWEEN, OTHER, WITHOUT_GRADIENTS
from cs_systems.config import Phase
from cs_systems.instrument.annotate import STEP, Label, OpenLabel, annotate
from cs_systems.instrument.compiler import is_tracing, untraced
from cs_systems.machine.device import Device
from cs_systems.measure.workloads._batches import tensors_in
from cs_systems.record import Sample

FORWARD, LOSS, BACKWARD, OPTIMIZER = (p.value for p in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER))
INPUT, COPY, CLIP, ZERO_GRAD, HOST_SYNC, REPLAY = "input", "copy", "clip", "zero_grad", "host_sync", "cuda_graph"
WAITING = frozenset({INPUT, COPY, HOST_SYNC, OTHER, BETWEEN})  # phases that launch little work, or none
Call = tuple[bool, tuple[tuple[int, ...], ...]]
_NO_THREAD = -1
_ORDER = (INPUT, COPY, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD, REPLAY, HOST_SYNC)


def in_order(names: list[str]) -> list[str]:
    """Return the names in the order of tables: phases that hooks find, the user's own, then the rest of the time."""
    known = [name for name in _ORDER if name in names]
    rest = [name for name in (OTHER, BETWEEN) if name in names]
    return [*known, *(name for name in dict.fromkeys(names) if name not in (*_ORDER, *rest)), *rest]


def call_of(arguments: Any) -> Call:
    """Return whether autograd records the call of a model now, and the shapes of its tensors except scalars."""
    tensors = [tensor for tensor in tensors_in(arguments) if tensor.dim()]
    shapes = tuple((t.size(0), t.numel()) if t.is_nested else tuple(t.shape) for t in tensors)  # nested: no shape
    return torch.is_grad_enabled(), shapes


class Clocks:
    """Clocks of the host and the device during a stage, used to find how far the device runs behind the host.

    They are compared at the begin and the end of the stage, when the device is idle, because they run at slightly
    different rates.
    """

    def __init__(self, device: Device, host: Callable[[], float]) -> None:
        self.device, self.host = device, host
        self._begin = self._end = self._compared()

    def end(self) -> None:
        """End the stage and wait for the device; the device's marks can be read afterwards."""
        self._end = self._compared()
        self.device.synchronize()

    def _compared(self) -> tuple[Any, float]:
        self.device.synchronize()
        return self.device.mark(), self.host()

    def lag_s(self, mark: Any, host_s: float) -> float:
        """Return how long after `host_s`, at which the host recorded the mark, the device reached it."""
        (begin, begun_s), (end, ended_s) = self._begin, self._end
        stage_s = self.device.between_s(begin, end)
        rate = (ended_s - begun_s) / stage_s if stage_s > 0 else 1.0
        return begun_s + rate * self.device.between_s(begin, mark) - host_s


class Cut(NamedTuple):
    """Position in a timeline: the number of boundaries and of recomputations before it."""

    boundary: int
    recomputed: int


class Timeline:
    """Boundaries of one step in order: the phase that begins there, the device's mark and the host's time.

    Inside the loop only boundaries are recorded; times are computed from them when the stage has ended.
    """

    def __init__(self, clocks: Clocks, name: str) -> None:
        self._clocks = clocks
        self._names: list[str] = []
        self._marks: list[Any] = []
        self._host: list[float] = []
        self._recomputed: list[tuple[Any, Any]] = []
        self.begin(name)

    def begin(self, name: str) -> None:
        """Begin a phase, and thereby end the previous one; do nothing if it is the same."""
        if self._names and self._names[-1] == name:
            return
        self._names.append(name)
        self._mark()

    def end(self) -> None:
        """End the step; the device may be behind."""
        self._mark()

    def boundaries(self) -> int:
        return len(self._names)

    def cut(self) -> Cut:
        """Add a boundary inside the current phase, and return it for `pieces`."""
        self._names.append(self._names[-1])
        self._mark()
        return Cut(len(self._names) - 1, len(self._recomputed))

    def pieces(self, cuts: Sequence[Cut]) -> Iterator[Timeline]:
        """Yield the timeline between these boundaries in pieces, each as a step."""
        for begin, end in itertools.pairwise((Cut(0, 0), *cuts)):
            piece = copy.copy(self)
            piece._names = self._names[begin.boundary : end.boundary]
            piece._marks = self._marks[begin.boundary : end.boundary + 1]
            piece._host = self._host[begin.boundary : end.boundary + 1]
            piece._recomputed = self._recomputed[begin.recomputed : end.recomputed]
            yield piece

    def now(self) -> Any:
        """Return a mark for now, on the device if it has a clock; callable from any thread."""
        device = self._clocks.device
        return device.mark() if device.is_cuda else self._clocks.host()

    def recomputed(self, begin: Any, end: Any) -> None:
        """Add a pair of marks between which backward recomputed forward."""
        self._recomputed.append((begin, end))

    def recomputed_s(self) -> float:
        """Return the seconds of recomputation during backward in this step; call it after the end of the stage."""
        return sum(self._clocks.device.between_s(begin, end) for begin, end in self._recomputed)

    def _mark(self) -> None:
        device, now = self._clocks.device, self._clocks.host()
        self._host.append(now)
        self._marks.append(device.mark() if device.is_cuda else now)

    def sample(self, *, warmup: bool) -> Sample:
        """Return the times of a step; call it after the end of the stage."""
        host, marks, device = self._host, self._marks, self._clocks.device
        names = self.resolved()
        phases, submit = dict.fromkeys(in_order(names), 0.0), dict.fromkeys(in_order(names), 0.0)
        lag: dict[str, float] | None = dict.fromkeys(phases, 0.0) if device.is_cuda else None
        for i, name in enumerate(names):
            phases[name] += device.between_s(marks[i], marks[i + 1])
            submit[name] += host[i + 1] - host[i]
            if lag is not None:
                lag[name] = round(self._clocks.lag_s(marks[i + 1], host[i + 1]), 9)
        return Sample(
            0, warmup, round(device.between_s(marks[0], marks[-1]), 9), {n: round(s, 9) for n, s in phases.items()},
            {n: round(s, 9) for n, s in submit.items()}, lag,
        )  # fmt: skip

    def resolved(self) -> list[str]:
        """Return the phase names after deciding those that depend on the following phase.

        Time after forward is loss only if backward follows: before another forward, a loop of reinforcement learning
        runs its environment. Time between steps is input if no DataLoader was seen.
        """
        gap = BETWEEN if INPUT in self._names else INPUT
        decided, follows = list[str](), OTHER
        for name in reversed(self._names):
            if name in (FORWARD, BACKWARD):
                follows = LOSS if name == BACKWARD else OTHER
            decided.append({BETWEEN: gap, LOSS: follows}.get(name, name))
        return decided[::-1]


class Moment(NamedTuple):
    """Phase at some time: its boundary in a timeline, which decides the phase's name when the step has ended.

    is_without_gradients: the last call of a model that began before it is not recorded by autograd.
    """

    timeline: Timeline
    boundary: int
    is_without_gradients: bool

    def phase(self) -> str:
        names = self.timeline.resolved()
        name = names[self.boundary] if 0 <= self.boundary < len(names) else OTHER
        return WITHOUT_GRADIENTS if name == FORWARD and self.is_without_gradients else name


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


class Looks(Protocol):
    """Observer of some steps: of the calls of models, of backward passes, and of optimizer steps."""

    is_looking: bool

    def call_begins(self, arguments: Any) -> None: ...

    def call_ends(self, result: Any) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_ends(self) -> None: ...

    def optimizer_begins(self, optimizer: Optimizer) -> None: ...

    def optimizer_ends(self, optimizer: Optimizer) -> None: ...


class Tracker:
    """Current state of the loop: the open phases, and the timeline of the step.

    Only the thread that made it is observed.

    Attributes:
        is_cuda: the loop runs on a GPU.
        timeline: boundaries of this step.
        idle: the phase in which a step begins.
        stepped: the optimizer was entered in this step.
        seen: all phases that were entered.
        calls: the number of calls of the models in this step by the result of `call_of`.
        iterators: the number of iterators that data loaders began in this step.
        has_ranges: each phase is also a range of the active profiler.
        before_next: called once, before the next phase begins.
        at_inputs: called with the arguments of each outermost call of a model, if it is set.
        looks: observer of the steps, if it is set.
        failure: an error of the observation itself, after which nothing is observed.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float],
        at_forward: Callable[[], object],
        at_backward: Callable[[Any], object],
    ) -> None:
        self._device, self._clock = device, clock
        # at_forward is called in the first forward, at_backward in each outermost backward pass, with its roots.
        self._at_forward, self._at_backward = at_forward, at_backward
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
        self.iterators = 0
        self.before_next: Callable[[], object] | None = None
        self.at_inputs: Callable[[Any], object] | None = None
        self.looks: Looks | None = None
        self.failure: Exception | None = None
        self.begin_stage()

    def begin_stage(self) -> None:
        """Begin a stage and its first step once the device is idle."""
        with self._unobserved():
            self._clocks = Clocks(self._device, self._clock)
        self.start()

    def end_stage(self) -> None:
        """Wait for the device; the times of the steps can be read afterwards."""
        with self._unobserved():
            self._clocks.end()

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
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
        self.iterators = 0
        self.timeline = Timeline(self._clocks, self.idle)
        self._label.switch((), self._ranges)
        self._show()

    def end(self, *, synchronize: bool) -> Timeline:
        """End the step, on request after waiting for the device, and return its boundaries."""
        self.timeline.end()
        if synchronize:
            with self._unobserved():
                self._device.synchronize()
        return self.timeline

    def moment(self) -> Moment:
        """Return the phase of now; callable from any thread."""
        timeline = self.timeline
        return Moment(timeline, timeline.boundaries() - 1, self._is_without_gradients)

    def rest(self, name: str) -> None:
        """Set the name of the time without an open phase from now on: OTHER or BETWEEN."""
        self._rest, self._in_loss = name, False
        self._switch()

    def observes(self) -> bool:
        """Return whether calls in this thread are observed now.

        Work that is captured into a CUDA graph does not run yet, and an event inside it has no time.
        """
        return threading.get_ident() == self._thread and not self.captures()

    def captures(self) -> bool:
        """Return whether work is being captured into a CUDA graph now."""
        return self.is_cuda and torch.cuda.is_current_stream_capturing()

    def fail(self, error: Exception) -> None:
        """Stop observing after an error of the observation, so that the program continues unobserved."""
        self.failure, self._thread = error, _NO_THREAD

    def is_open(self, *names: str) -> bool:
        """Return whether one of these phases was entered and has not ended."""
        return any(found in names for found, *_ in self._found)

    def depth(self, name: str) -> int:
        """Return how many phases of this name are open inside each other."""
        return sum(found == name for found, *_ in self._found)

    def enter(self, name: str, arguments: Any = ()) -> None:
        """Begin a phase that a hook found; the caller checks `observes` first.

        A forward pass inside a backward pass is a recomputation for torch.utils.checkpoint, and belongs to backward.

        arguments: the positional and named arguments of the call, those of a model with the model first. The shapes of
            the latter are counted; nothing waits for the device.
        """
        self.call_before_next()
        repeats = name == FORWARD and self.is_open(BACKWARD)
        if name == FORWARD and not (repeats or self.is_open(FORWARD) or is_tracing()):
            call = call_of(arguments)
            self.calls[call] += 1
            self._is_without_gradients = not call[0]
            if self.at_inputs is not None:
                self.at_inputs(arguments)
            if self.looks is not None and self.looks.is_looking and not self.is_open(OPTIMIZER):
                self.looks.call_begins(arguments)
        if name == FORWARD and FORWARD not in self.seen:
            self._at_forward()
        shown = BACKWARD if repeats else name
        if name == BACKWARD and not self.is_open(BACKWARD):
            self._at_backward(arguments[0][0])
            if self.looks is not None:
                self.looks.backward_begins()
        self.seen.add(shown)
        self.stepped |= name == OPTIMIZER
        self._found.append((name, shown, self._in_loss))
        self._in_loss = False
        self._switch()

    def call_before_next(self) -> None:
        """Call `before_next` once, if it is set, even if it begins a phase itself by waiting for the device."""
        call, self.before_next = self.before_next, None
        if call is not None:
            call()

    def exit(self, name: str, *, is_differentiable: bool = False, result: Any = None) -> None:
        """End the phase that `enter` began, if an exception has not ended it before.

        is_differentiable: backward made a graph of the gradients, as for a gradient penalty, so it is part of the loss.
        result: of the call of a model.
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
        if self.looks is not None and self.looks.is_looking and not self.is_open(shown):
            if shown == FORWARD and not self.is_open(OPTIMIZER):
                self.looks.call_ends(result)
            elif name == BACKWARD:
                self.looks.backward_ends()

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Begin the phase of an optimizer's step."""
        self.enter(OPTIMIZER)
        if self.looks is not None and self.looks.is_looking:
            self.looks.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """End the phase of an optimizer's step."""
        if self.looks is not None and self.looks.is_looking:
            self.looks.optimizer_ends(optimizer)
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
