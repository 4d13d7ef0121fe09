"""Observers of a recorded loop: the calls that each receives, and the class that passes them on.

An observer is a file that overrides the calls it needs. Calls in timed steps take some nanoseconds. Calls that begin
with `look` read the program's objects, and are made only in untimed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from cs_systems.core.caveats import Caveat
from cs_systems.core.tables import Row, Tables
from cs_systems.instrument.annotate import hidden_from_modes
from cs_systems.instrument.compiler import Observation, untraced
from cs_systems.measure.recorder.guard import Guest, as_guest
from cs_systems.measure.recorder.inputs import StepInputs
from cs_systems.measure.recorder.phases import Timeline

MOST_LOOKS = 10  # most consecutive steps with looks


class Period(Enum):
    """Steps of one kind in a recording."""

    FIRST = auto()  # the first warm-up step
    WARMUP = auto()
    LAST = auto()  # the last warm-up step, without any look, so that the timing begins undisturbed
    TIMED = auto()
    PROFILED = auto()
    HISTORY = auto()  # the memory history is on
    SAMPLED = auto()  # the stack is sampled, after all other steps


UNTIMED = (Period.FIRST, Period.WARMUP, Period.LAST)


class ModelCall(NamedTuple):
    """Outermost call of a model.

    arguments: positional (the model first) and named ones. is_recorded: autograd records it. is_in_update: an optimizer
    made it. number: number of this call in its step, from 1.
    """

    arguments: Any
    is_recorded: bool
    is_in_update: bool
    number: int


class EnginePass(NamedTuple):
    """Pass of autograd's engine.

    weights: the gradients of the roots. inputs: those of autograd.grad; backward has none. gradients: what the engine
    returns, by the inputs.
    """

    roots: Sequence[Tensor]
    weights: Sequence[Tensor | None]
    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


class Found(NamedTuple):
    """Results of an observer for the steps of one stage."""

    tables: Tables
    caveats: Sequence[Caveat] = ()


class Timing(NamedTuple):
    """Phases of the timed steps: the median of each and all its times, and the elements of the models' inputs.

    sizes: the elements of the inputs in each step. calls: the number of calls of the models in each step. has_workers:
    a data loader with workers gave batches.
    """

    phases_s: dict[str, float]
    all_s: Mapping[str, Sequence[float]]
    elements: float | None
    sizes: Sequence[int] = ()
    calls: Sequence[int] = ()
    has_workers: bool = False


class Observer(Guest):
    """Observer of a loop in the thread that runs it; every call does nothing by default.

    Attributes:
        is_looking: whether the methods named `look…` are called now.
        runs_operators: looks and conclusions run torch operators, so they are skipped while the program runs a
            profiler.
        kept: tables found so far.
    """

    is_looking = False
    runs_operators = True

    def __init__(self) -> None:
        self.kept: dict[str, Sequence[Row]] = {}

    def keep(self, table: Any, rows: Sequence[Any]) -> None:
        """Keep a table if it has rows."""
        if rows:
            self.kept |= table.filled(rows)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.is_looking = False

    # called in every step; they must not read a tensor

    def backward_begins(self, roots: Any) -> None:
        """Note the start of an outermost backward pass."""

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        """Note the end of a step."""

    def step_failed(self) -> None:
        """Forget a step that ends with an exception."""

    def step_later(self, optimizer: Optimizer) -> None:
        """Note a step of an unedited script after the recording, at the end of the optimizer's."""

    # called in observed steps, hidden from the program's modes

    def look_at_call(self, call: ModelCall) -> None:
        """Observe a call of a model."""

    def look_at_result(self, result: Any, is_in_update: bool) -> None:
        """Observe the result of such a call."""

    def look_before_backward(self, roots: Any) -> None:
        """Observe the state before a backward pass."""

    def look_after_backward(self) -> None:
        """Observe the state after a backward pass."""

    def look_at_wait(self) -> None:
        """Note that the host is about to wait for an accelerator: it reads a value, or synchronises."""

    def look_at_pass(self, each: EnginePass) -> None:
        """Observe an outermost pass of autograd's engine after its end."""

    def look_before_update(self, optimizer: Optimizer) -> None:
        """Observe the state before an optimizer's step."""

    def look_after_update(self, optimizer: Optimizer) -> None:
        """Observe the state after an optimizer's step."""

    def look_at_skip(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer that a GradScaler skipped."""

    def look_after_step(self) -> None:
        """Observe the state between two steps."""

    def stop_looking(self) -> None:
        """End the looks of this period."""
        self.is_looking = False

    # called between steps

    def begins(self, period: Period) -> None:
        """Begin to observe the steps of a period."""

    def restart(self) -> None:
        """Forget the steps so far, because they were not part of the training."""

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Evaluate the timed steps, hidden from the program's modes.

        shapes: the shapes of the first inputs of the models' calls in a step.
        """

    def end(self) -> None:
        """Evaluate the recording, hidden from the program's modes, while its models and optimizers are still known."""

    def results(self, inputs: Sequence[StepInputs], is_timed: bool) -> Found | None:
        """Return the results for the stage that ends; `inputs` are its steps' inputs."""
        return None

    def tables(self, timing: Timing, others: Tables) -> Tables:
        """Return the tables about the whole loop; `others` are the tables of earlier observers."""
        return self.kept


class FewSteps(Observer):
    """Observer of a few consecutive warm-up steps, and of a few steps after the timed ones."""

    _looks = 0

    def begins(self, period: Period) -> None:
        self.stop_looking()
        self.is_looking, self._looks = period in (Period.WARMUP, Period.SAMPLED), 0

    def look_after_step(self) -> None:
        self._looks += 1
        if self._looks >= MOST_LOOKS:
            self.stop_looking()


class Replacing(FewSteps):
    """Observer of a few steps that replaces functions of the program's libraries while it looks."""

    def __init__(self) -> None:
        super().__init__()
        self._installed: Observation | None = None

    def _start(self) -> None:
        """Begin a step: forget what an unfinished one showed."""
        raise NotImplementedError

    def stop_looking(self) -> None:
        super().stop_looking()
        if self._installed is not None:
            self._installed.close()
        self._installed = None
        self._start()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.stop_looking()

    def step_failed(self) -> None:
        self._start()


def is_profiled() -> bool:
    """Return whether a profiler of the program is active; it would record this package's operators."""
    return bool(torch._C._autograd._profiler_enabled())


Hidden = Callable[[], AbstractContextManager[None]]


def hiding(unobserved: Hidden, own_time: Hidden) -> Hidden:
    """Return a context for this package's own work in the loop: hidden from the program's modes, and not timed.

    unobserved: a context in which no work counts as the program's. own_time: a context that excludes its time from the
    loop.
    """

    @contextmanager
    def hidden() -> Iterator[None]:
        with own_time(), unobserved(), hidden_from_modes(), torch.no_grad():
            yield

    return hidden


class Observers:
    """List of the observers of a loop; an error in one ends only that one."""

    def __init__(self, every: Sequence[Observer] = (), hidden: Hidden | None = None) -> None:
        self._every, self._hidden = every, hidden
        self._calls = {
            name: [
                (each, partial(as_guest(getattr(type(each), name)), each))
                for each in every
                if getattr(type(each), name) is not getattr(Observer, name)
            ]
            for name, member in vars(Observer).items()
            if callable(member) and not name.startswith("_")
        }
        self._interrupted: list[Observer] = []  # interrupted until the next step by a profiler of the program
        self.period: Period | None = None
        self.is_looking = False  # whether any of them is looking

    def _tell(self, name: str, *args: Any) -> None:
        for each, call in self._calls[name]:
            if each.failure is None:
                call(*args)

    @untraced
    def _look(self, name: str, *args: Any) -> None:
        if self._hidden is None or not (calls := self._calls[name]):
            return
        if is_profiled():
            for each in self._every:
                if each.is_looking and each.runs_operators:
                    each.stop_looking()
                    self._interrupted.append(each)
        with self._hidden():
            for each, call in calls:
                if each.is_looking:
                    call(*args)

    def _conclude(self, name: str, *args: Any) -> None:
        if self._hidden is None:
            return
        profiled = is_profiled()
        with self._hidden():
            for each, call in self._calls[name]:
                if each.failure is None and not (profiled and each.runs_operators):
                    call(*args)

    def begin(self, period: Period) -> None:
        self.period = period
        self._interrupted.clear()
        self._tell("begins", period)
        self._find_looking()

    def restart(self) -> None:
        self._tell("restart")

    def call_begins(self, call: ModelCall) -> None:
        self._look("look_at_call", call)

    def call_ends(self, result: Any, is_in_update: bool) -> None:
        self._look("look_at_result", result, is_in_update)

    def backward_begins(self, roots: Any) -> None:
        self._tell("backward_begins", roots)
        if self.is_looking:
            self._look("look_before_backward", roots)

    def wait_begins(self) -> None:
        self._look("look_at_wait")

    def backward_ends(self, each: EnginePass) -> None:
        self._look("look_after_backward")
        self._look("look_at_pass", each)

    def update_begins(self, optimizer: Optimizer) -> None:
        self._look("look_before_update", optimizer)

    def update_ends(self, optimizer: Optimizer) -> None:
        self._look("look_after_update", optimizer)

    def update_skipped(self, optimizer: Optimizer) -> None:
        if self.is_looking:
            self._look("look_at_skip", optimizer)

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        self._tell("step_recorded", number, timeline)
        if self.is_looking:
            self._look("look_after_step")
            for each in self._interrupted:
                each.is_looking = each.failure is None
            self._interrupted.clear()
            self._find_looking()

    def _find_looking(self) -> None:
        self.is_looking = any(each.is_looking for each in self._every)

    def step_failed(self) -> None:
        self._tell("step_failed")

    def step_later(self, optimizer: Optimizer) -> None:
        self._tell("step_later", optimizer)

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._conclude("timing_ended", shapes)

    def stop_looking(self) -> None:
        """End the looks, and remove what they have installed."""
        self.is_looking = False
        for each in self._every:
            each.stop_looking()

    def end(self) -> None:
        self.stop_looking()
        self._conclude("end")

    def results(self, inputs: Sequence[StepInputs], is_timed: bool) -> Found:
        """Return the results of all observers for the steps of a stage."""
        tables: Tables = {}
        caveats: list[Caveat] = []
        if self._hidden is not None:
            with self._hidden():
                for each, results in self._calls["results"]:
                    found = results(inputs, is_timed) if each.failure is None else None
                    if found is not None:
                        tables = {**tables, **found.tables}
                        caveats += found.caveats
        return Found(tables, caveats)

    def tables(self, timing: Timing) -> Tables:
        """Return the tables of all observers about the whole loop."""
        found: Tables = {}
        for each in self._every:
            found = {**found, **each.tables(timing, found)}
        return found
