"""Calls of modules that compute a result again: the same module, the same inputs and the same result in one step.

In a few warm-up steps on a CPU, the call of modules is replaced by one that compares tensors by their sums and some of
their elements. So a call that is not the same because of dropout or an update has another result. Layers that are
called again within different modules count too, such as those of a slice of nn.Sequential. Of calls inside each other,
the outermost one that repeats another counts. A backward pass ends the comparison, because it frees the results of
forward.

Nothing is compared on a GPU, where each comparison would wait for the device, or in a process that compiles: code
compiled in these steps could keep the replaced call. No hook is installed, on a module or globally: guards of compiled
code check hooks, and torch.compile warns of global ones.

Other observers can see the same calls: the call of modules is replaced once for all of them.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from cs_systems.analysis.comparison.loop_findings import REPEATED_MODULES, RepeatedModulesRow
from cs_systems.instrument.compiler import Observation, is_tracing
from cs_systems.measure.recorder import hooks
from cs_systems.measure.recorder.gradients import some_values
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.marked import Marked
from cs_systems.measure.recorder.observers import Hidden, Observer, Period, Replacing, is_profiled
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER
from cs_systems.measure.recorder.stacks import Line, own_lines, place_of
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.workloads._batches import tensors_in

MOST_STEPS = 3  # the comparison takes as long as a small model's step
MOST_CALLS, MOST_OWN_S = 5000, 2.0  # of a step: compared calls, and the time that comparing them takes
MOST_VALUES = 64  # most compared elements of a tensor
FEWEST_ELEMENTS = 1024  # of a call's inputs; small ones, such as the states of a game, may well be the same again


class _Content(NamedTuple):
    """Content of a tensor.

    `is_telling` if its elements differ, so that an equal tensor is hardly a coincidence.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_telling: bool
    values: int
    total: Any

    def elements(self) -> int:
        return math.prod(self.shape)


class _Repeat(NamedTuple):
    """Call that repeats another one, with the part of its time in operators that autograd records.

    parametrized: the weight that it computes, if it is a parametrization. method: its way to make it orthogonal.
    """

    module: str
    line: Line | None
    time_s: float
    recorded_s: float
    parametrized: str | None
    method: str | None


class SeenCall(NamedTuple):
    """Call of a module that has just ended.

    Attributes:
        inputs: its positional and named arguments.
        time_s: its time without this package's own work; inner_s: the time of the calls inside it.
        begin_s: when it began, by `time.perf_counter`; calls inside it began later.
        outermost: the module of the outermost open call, which may be this one.
        is_outermost: no other call is open around it.
    """

    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any
    begin_s: float
    time_s: float
    inner_s: float
    outermost: nn.Module
    is_outermost: bool

    def named(self) -> str:
        """Return the module's name within the outermost one, such as `Net.encoder.0`, or its class."""
        return _named(self.module, self.outermost)


def _named(module: nn.Module, outermost: nn.Module) -> str:
    inner = next((name for name, each in outermost.named_modules() if each is module and name), None)
    return f"{type(outermost).__name__}.{inner}" if inner else type(module).__name__


class CallObserver(Observer):
    """Observer of the calls that `ModuleCalls` sees, in its steps; it makes its methods `as_guest`."""

    def call_seen(self, call: SeenCall) -> None:
        """Look at a call of a module, hidden from the program's modes."""

    def step_seen(self, modules_s: float) -> None:
        """Note the end of a step with whole calls, and the time of all its modules."""


@dataclass
class _Frame:
    """Open call of a module, with the time of our own work and of the calls inside it."""

    module: nn.Module | None
    key: Hashable | None
    inputs: Any = ()
    begin_s: float = 0.0
    own_s: float = 0.0
    inner_s: float = 0.0
    recorded_s: float = 0.0
    repeats: list[_Repeat] = field(default_factory=list)

    def add(self, inner: _Frame, lasted_s: float) -> None:
        """Add a call inside this one, which has ended."""
        self.own_s += inner.own_s
        self.inner_s += lasted_s
        self.recorded_s += inner.recorded_s
        self.repeats += inner.repeats


class ModuleCalls(Replacing):
    """Observer of all calls of modules in a few warm-up steps.

    hidden: context for looks. compilations: the number of compilations of this process so far. others: observers that
    see the same calls.
    """

    def __init__(
        self, tracker: Tracker, hidden: Hidden, compilations: Callable[[], int], others: Sequence[CallObserver] = ()
    ) -> None:
        super().__init__()
        self._others = others
        self._tracker, self._hidden, self._compilations = tracker, hidden, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[_Frame] = []
        self._start()

    def _start(self) -> None:
        """Begin a step, in an outermost frame without a module."""
        self._open = [_Frame(None, None)]
        self._count, self._own_s = 0, 0.0
        self._forget()

    def _forget(self) -> None:
        self._known: dict[Hashable, tuple[weakref.ref[nn.Module], Hashable]] = {}
        self._contents: dict[int, tuple[weakref.ref[Tensor], int, _Content]] = {}

    def begins(self, period: Period) -> None:
        super().begins(period)
        self.is_looking = period is Period.WARMUP and self._may_look() and len(self._steps) < MOST_STEPS
        if self.is_looking:
            self._start()
            self._installed = Observation()
            self._installed.add(partial(hooks.report_calls, self._begins, self._ends), is_guarded=True)

    def _may_look(self) -> bool:
        return not (self._tracker.is_cuda or self._compilations())

    def look_after_backward(self) -> None:
        self._forget()

    def look_after_step(self) -> None:
        super().look_after_step()
        if self._installed is None:
            return
        is_whole = self._is_within_limits() and self._may_look()
        if self._count and is_whole:
            self._steps.append(self._open[0])
            for each in self._seeing():
                each.step_seen(self._open[0].inner_s)
        self._start()
        if len(self._steps) >= MOST_STEPS or not is_whole:
            self.stop_looking()

    def _observes(self) -> bool:
        if not (self.is_looking and self._tracker.observes() and self._is_within_limits()):
            return False
        if self._tracker.is_open(BACKWARD, OPTIMIZER) or is_tracing() or is_profiled():
            return False
        return bool(torch._C._functorch.peek_interpreter_stack() is None)  # tensors of torch.func hide their elements

    def _is_within_limits(self) -> bool:
        return self._count < MOST_CALLS and self._own_s < MOST_OWN_S

    @as_guest
    def _begins(self, module: nn.Module, inputs: Any) -> None:
        if not self._observes():
            return
        began_s = time.perf_counter()
        with self._hidden():
            frame = _Frame(module, self._key(module, inputs), inputs)
        self._count += 1
        frame.begin_s = time.perf_counter()
        self._add_own(frame.begin_s - began_s)
        self._open.append(frame)

    @as_guest
    def _ends(self, module: nn.Module, result: Any) -> None:
        if not self._observes() or all(frame.module is not module for frame in self._open):
            return
        ended_s = time.perf_counter()
        while self._open[-1].module is not module:  # an exception has left inner calls open
            left = self._open.pop()
            self._open[-1].add(left, left.inner_s)
        frame = self._open.pop()
        lasted_s = max(0.0, ended_s - frame.begin_s - frame.own_s)
        is_grad_enabled = torch.is_grad_enabled()
        seen = self._seen(frame, module, result, lasted_s)
        with self._hidden():
            if is_grad_enabled and any(each.requires_grad for each in tensors_in(result)):
                frame.recorded_s += max(0.0, lasted_s - frame.inner_s)
            repeats = self._is_repeat(frame, result)
            for each in self._seeing():
                each.call_seen(seen)
        if repeats:
            line = own_lines(sys._getframe(1))[1]
            weight = self._parametrized()
            method = getattr(getattr(module, "orthogonal_map", None), "name", None)
            frame.repeats = [_Repeat(type(module).__name__, line, lasted_s, frame.recorded_s, weight, method)]
        self._open[-1].add(frame, lasted_s)
        self._add_own(time.perf_counter() - ended_s)

    def _parametrized(self) -> str | None:
        """Return the weight that the innermost open call computes from its parametrizations; None if it is another."""
        modules = [each.module for each in self._open if each.module is not None]
        if not modules or not isinstance(modules[-1], ParametrizationList):
            return None
        return _named(modules[-1], modules[0]).replace("parametrizations.", "")

    def _seeing(self) -> Iterator[CallObserver]:
        return (each for each in self._others if each.failure is None)

    def _seen(self, frame: _Frame, module: nn.Module, result: Any, lasted_s: float) -> SeenCall:
        """Return the call that has ended, after its frame was removed."""
        outer = next((each.module for each in self._open if each.module is not None), None)
        inputs, outermost = frame.inputs, outer if outer is not None else module
        return SeenCall(module, inputs, result, frame.begin_s, lasted_s, frame.inner_s, outermost, outer is None)

    def _add_own(self, own_s: float) -> None:
        self._own_s += own_s
        self._open[-1].own_s += own_s

    def _key(self, module: nn.Module, inputs: Any) -> Hashable | None:
        """Return a key that only equal inputs of a module share; None if they cannot be distinguished from others."""
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            return None
        contents = self._contents_of(inputs)
        if contents is None or sum(each.elements() for each in contents if each.is_telling) < FEWEST_ELEMENTS:
            return None
        return id(module), torch.is_grad_enabled(), module.training, contents

    def _is_repeat(self, frame: _Frame, result: Any) -> bool:
        """Return whether an earlier call of the module had the same inputs and the same result."""
        if frame.key is None or frame.module is None or not (values := self._contents_of(result)):
            return False
        module, before = self._known.get(frame.key, (None, None))
        self._known[frame.key] = weakref.ref(frame.module), values
        return module is not None and module() is frame.module and before == values

    def _contents_of(self, value: Any) -> tuple[_Content, ...] | None:
        """Return the contents of all tensors of a value; None if one of them cannot be read, or it has other parts."""
        tensors = [*_tensors(value)]
        contents = [self._content(each) if isinstance(each, Tensor) else None for each in tensors]
        known = tuple(each for each in contents if each is not None)
        return known if len(known) == len(tensors) else None

    def _content(self, tensor: Tensor) -> _Content | None:
        is_plain = type(tensor) in (Tensor, nn.Parameter, Marked) and tensor.layout is torch.strided
        if not is_plain or tensor.is_quantized or not (count := tensor.numel()):
            return None
        version = -1 if tensor.is_inference() else tensor._version
        reference, known_version, content = self._contents.get(id(tensor), (None, 0, None))
        if reference is not None and reference() is tensor and version == known_version >= 0:
            return content
        try:
            values = some_values(tensor, min(count, MOST_VALUES))
            total = tensor.detach().sum().item()
        except RuntimeError:  # a dtype or a device without this operator
            return None
        if not values:
            return None
        is_telling = len({*values}) > 1
        content = _Content(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_telling, hash(values), total)
        self._contents[id(tensor)] = weakref.ref(tensor), version, content
        return content

    def end(self) -> None:
        row = _row(self._steps)
        self.keep(REPEATED_MODULES, [row] if row else [])
        self._steps.clear()


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in tuples, lists and dicts, and everything else as it is, except numbers, texts and None."""
    if isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
    elif not isinstance(value, (int, float, str, type(None))):
        yield value


def _row(steps: Sequence[_Frame]) -> RepeatedModulesRow | None:
    """Return the repeated calls of a step, on average; None without any."""
    repeats = [each for step in steps for each in step.repeats]
    if not repeats:
        return None
    lines, modules = Counter[Line](), Counter[str]()
    weights: Counter[tuple[str | None, str | None]] = Counter()
    for each in repeats:
        modules[each.module] += each.time_s  # type: ignore[assignment]
        weights[each.parametrized, each.method] += each.time_s  # type: ignore[assignment]
        if each.line is not None:
            lines[each.line] += each.time_s  # type: ignore[assignment]
    again_s, in_modules_s = sum(each.time_s for each in repeats), sum(step.inner_s for step in steps)
    again_recorded_s, recorded_s = sum(each.recorded_s for each in repeats), sum(step.recorded_s for step in steps)
    weight, method = max(weights, key=weights.__getitem__)
    return {
        "module": max(modules, key=modules.__getitem__),
        "steps": sum(bool(step.repeats) for step in steps),
        "of_steps": len(steps),
        "calls": round(len(repeats) / len(steps)),
        "time_s": again_s / len(steps),
        "share": again_s / in_modules_s if in_modules_s else 0.0,
        "recorded_share": again_recorded_s / recorded_s if recorded_s else 0.0,
        "place": place_of(max(lines, key=lines.__getitem__)) if lines else None,
        "parametrized": weight,
        "method": method,
    }
