"""Calls of modules with results that nothing reads, such as those of heads for other tasks, on a CPU.

In its first step, this observer only looks for calls with parameters that no backward pass reaches. If there are any,
it marks the results of calls in later steps. A result counts as unused only if its tensors cease to exist without any
use, with or without a gradient. A call is left out if hooks or its own code could read what is inside of it, and if it
leaves tensors or changes buffers in its modules, except statistics of batches. In a program that asks for classes,
which marks change, nothing is looked for.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import mean
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from cs_systems.analysis.comparison.loop_findings import UNUSED_OUTPUTS, UnusedOutputsRow
from cs_systems.measure.recorder.graph_size import leaves_below
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.marked import Marked, Uses, may_see_types
from cs_systems.measure.recorder.module_calls import CallObserver, SeenCall
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.stacks import Line, function_of, is_own, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.workloads._batches import tensors_in

LEAST_SHARE = 0.05  # of the modules' time; results are marked only above it
FEWEST_STEPS = 2
_NUMBERS = {"detach", "detach_", "data", "item", "tolist", "numpy", "no_grad", "inference_mode", "set_grad_enabled"}
_CASTS = {"float", "int", "bool", "print"}  # called as functions


@dataclass
class _Call:
    """Call of a module with trained parameters, and the calls inside it that have some, too.

    may_be_unused: the call does nothing but to return its result, which autograd records. uses: of marked results.
    """

    name: str
    begin_s: float
    time_s: float
    line: Line | None
    parameters: frozenset[int]
    may_be_unused: bool
    inner: list[_Call]
    uses: Uses | None = None

    def unused(self, reached: Iterable[int]) -> Iterator[_Call]:
        """Yield the outermost calls, from this one on, with parameters that no backward pass has reached."""
        if self.may_be_unused and self.parameters.isdisjoint(reached):
            yield self
        else:
            for each in self.inner:
                yield from each.unused(reached)

    def unread(self, reached: Iterable[int]) -> Iterator[_Call]:
        """Yield those of them with results that nothing uses."""
        for each in self.unused(reached):
            if each.uses is not None and each.uses.are_none():
                yield each


class UnusedOutputs(CallObserver):
    """Observer of the results of modules."""

    def __init__(self, subject: Subject, tracker: Tracker) -> None:
        super().__init__()
        self._subject, self._tracker = subject, tracker
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._marks = False
        self._steps: list[tuple[list[_Call], set[int], float]] = []  # calls, reached parameters, and the modules' time
        self._versions: dict[int, tuple[int, ...]] = {}  # of buffers, by the identity of the module
        self.step_failed()

    def step_failed(self) -> None:
        self._calls: list[_Call] = []
        self._reached = set[int]()

    def begins(self, period: Period) -> None:
        self.is_looking = period is Period.WARMUP and self._subject.world_size == 1
        self.step_failed()

    def look_before_backward(self, roots: Any) -> None:
        self._reached |= {id(each) for each in leaves_below(roots)}

    @as_guest
    def call_seen(self, call: SeenCall) -> None:
        parameters = frozenset(id(each) for each in call.module.parameters() if each.requires_grad)
        if not self.is_looking or not parameters:
            return
        inner = [each for each in self._calls if each.begin_s >= call.begin_s]
        self._calls = self._calls[: len(self._calls) - len(inner)]
        line = own_lines(sys._getframe(1))[1]
        found = _Call(
            call.named(), call.begin_s, call.time_s, line, parameters, self._only_returns(call), inner
        )  # fmt: skip
        self._calls.append(found)
        if self._marks and found.may_be_unused:
            found.uses = Uses(self._tracker.is_paused)
            for each in tensors_in(call.result):
                found.uses.mark(each)

    def _only_returns(self, call: SeenCall) -> bool:
        """Return whether a call seems to do nothing but to return tensors that autograd records."""
        tensors = [*_tensors(call.result)]
        if not tensors or not all(type(each) in (Tensor, Marked) for each in tensors):
            return False
        modules = [*call.module.modules()]
        versions = tuple(
            each._version
            for module in modules
            if not isinstance(module, nn.modules.batchnorm._NormBase)
            for each in module.buffers(recurse=False)
        )
        is_same = self._versions.setdefault(id(call.module), versions) == versions
        self._versions[id(call.module)] = versions
        with_gradient = any(each.grad_fn is not None for each in tensors)
        return is_same and with_gradient and not any(_may_be_looked_into(each) for each in modules)

    @as_guest
    def step_seen(self, modules_s: float) -> None:
        calls, reached, marked = self._calls, self._reached, self._marks
        self.step_failed()
        if not reached:
            return
        if marked:
            self._steps.append((calls, reached, modules_s))
        else:
            unused_s = sum(each.time_s for call in calls for each in call.unused(reached))
            self._marks = unused_s >= LEAST_SHARE * modules_s and not may_see_types()

    def end(self) -> None:
        steps = [
            ([each for call in calls for each in call.unread(reached)], modules_s)
            for calls, reached, modules_s in self._steps
        ]
        if len(steps) >= FEWEST_STEPS and all(calls for calls, _ in steps):
            self.keep(UNUSED_OUTPUTS, [_row(steps)])
        for calls, _, _ in self._steps:
            for call in calls:
                _end_marks(call)
        self._steps.clear()
        self._versions.clear()


def _row(steps: list[tuple[list[_Call], float]]) -> UnusedOutputsRow:
    every = [each for calls, _ in steps for each in calls]
    first = max(every, key=lambda each: each.time_s)
    return {
        "module": first.name,
        "calls": round(len(every) / len(steps)),
        "steps": len(steps),
        "time_s": sum(each.time_s for each in every) / len(steps),
        "share": mean(sum(each.time_s for each in calls) / modules_s for calls, modules_s in steps),
        "function": function_of(first.line) if first.line else None,
        "place": place_of(first.line) if first.line else None,
    }


def _end_marks(call: _Call) -> None:
    """End the marks of the tensors that still exist."""
    if call.uses is not None:
        call.uses.end()
    for each in call.inner:
        _end_marks(each)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in tuples, lists and dicts, and everything else as it is, except None."""
    if isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
    elif value is not None:
        yield value


def _may_be_looked_into(module: nn.Module) -> bool:
    """Return whether hooks, or a tensor that is left in a module, may show more of a call than its result."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    has_global = bool(global_hooks._global_forward_hooks or global_hooks._global_backward_hooks)
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    return any(hooks) or has_global or any(True for _ in tensors_in(own)) or takes_numbers(type(module).forward)


@functools.lru_cache(maxsize=256)
def takes_numbers(forward: Callable[..., object]) -> bool:
    """Return whether a program's own forward may hand on more than it returns, such as numbers for a meter."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is None or (is_own(code.co_filename) and _hands_on(code))


def _hands_on(code: CodeType) -> bool:
    calls = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return not (_NUMBERS.isdisjoint(code.co_names) and _CASTS.isdisjoint(calls)) or any(map(_hands_on, inner))
