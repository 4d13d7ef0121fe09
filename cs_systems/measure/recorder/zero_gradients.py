"""Gradients of zeros behind operators without a slope, such as torch.round between an encoder and a decoder.

In a few steps, the graph of each backward pass is walked. A parameter is told if each way from the losses to it goes
through such an operator, in all steps, and if its gradient is zero indeed. A straight-through estimate, of whatever
form, has another way, or is a function without such an operator in its graph.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import ZERO_GRADIENTS, ZeroGradientsRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.gradients import evenly
from cs_systems.measure.recorder.graph_size import MOST_NODES, first_nodes
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of
from cs_systems.measure.recorder.tracker import Tracker

MOST_STEPS = 3  # of each period
MOST_READ = 8  # most gradients of a step that are read, of parameters behind such an operator
OPERATORS = "round floor ceil trunc fix sign"
_NODES = {f"{each.capitalize()}Backward{n}": each for each in OPERATORS.split() for n in (0, 1)}


class ZeroGradients(Replacing):
    """Observer of the parameters to which no gradient comes but through an operator without a slope.

    compilations: the number of compilations of this process so far.
    """

    def __init__(self, subject: Subject, tracker: Tracker, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._subject, self._tracker, self._compilations = subject, tracker, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = 0
        self._zero = Counter[int]()  # steps in which a parameter was behind such an operator, by its `id`
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._others = set[int]()  # parameters with another way to a loss, or with a gradient
        self._operators: dict[int, tuple[str, Line | None]] = {}  # in front of a parameter
        self._start()

    def _start(self) -> None:
        self._lines: dict[int, Line] = {}  # by the number of the operator
        self._behind: dict[int, Tensor] = {}
        self._is_read = False

    def begins(self, period: Period) -> None:
        super().begins(period)
        self._steps_here = 0
        if self.is_looking and period is Period.WARMUP and not self._compilations():
            self._process = os.getpid()  # a worker of a data loader inherits the replaced functions
            self._installed = Observation()
            for name in OPERATORS.split():
                for owner, called in ((torch, name), (Tensor, name), (Tensor, f"{name}_")):
                    self._installed.add(partial(_watched, owner, called, self._called), is_guarded=True)

    @as_guest
    def _called(self, result: Any) -> None:
        if self._tracker.observes() and os.getpid() == self._process and not is_tracing() and type(result) is Tensor:
            node, line = result.grad_fn, own_lines(sys._getframe(1))[1]
            if node is not None and line is not None:
                self._lines[node._sequence_nr()] = line

    def look_before_backward(self, roots: Any) -> None:
        held = {id(p): p for p in parameters_of(*self._subject.optimizers)}
        free, edge = _reached(first_nodes(roots))
        self._others |= {id(leaf) for leaf in free}
        for node in edge:
            leaves, _ = _reached([each for each, _ in node.next_functions if each is not None], into=True)
            behind = {id(leaf): leaf for leaf in leaves if id(leaf) in held and id(leaf) not in self._others}
            if behind:
                self._behind |= behind
                operator = _NODES[node.name()], self._lines.get(node._sequence_nr())
                self._operators |= {which: operator for which in behind if operator[1] or which not in self._operators}

    def look_before_update(self, optimizer: Optimizer) -> None:
        held = {id(p) for p in parameters_of(optimizer)}
        mine = [p for which, p in self._behind.items() if which in held]
        if not mine:
            return
        read = evenly(mine, MOST_READ)
        self._is_read = True
        if any(p.grad is None or p.grad.layout is not torch.strided or bool(p.grad.any()) for p in read):
            self._others |= {id(p) for p in mine}

    def look_after_step(self) -> None:
        self._steps += 1
        self._steps_here += 1
        if self._is_read:
            self._zero.update(self._behind.keys())
            self._parameters |= {which: weakref.ref(p) for which, p in self._behind.items()}
        self._start()
        super().look_after_step()
        if self._steps_here >= MOST_STEPS:
            self.stop_looking()

    def end(self) -> None:
        self.keep(ZERO_GRADIENTS, [*self._rows()])
        self._start()

    def _rows(self) -> Iterable[ZeroGradientsRow]:
        alive = {which for which, reference in self._parameters.items() if reference() is not None}
        found = {which for which in alive if self._zero[which] == self._steps} - self._others
        if not found:
            return
        named = self._named()
        ((operator, line), _), *_ = Counter(self._operators[which] for which in found).most_common(1)
        yield {
            "parameters": len(found),
            "of_parameters": len({id(p) for p in parameters_of(*self._subject.optimizers)}),
            "first": next((name for which, name in named.items() if which in found), None),
            "operator": operator,
            "function": None if line is None else function_of(line),
            "place": None if line is None else place_of(line),
            "steps": self._steps,
        }

    def _named(self) -> dict[int, str]:
        models = [m.module if isinstance(m, DistributedDataParallel) else m for m in self._subject.models]
        return {id(p): f"{type(model).__name__}.{name}" for model in models for name, p in model.named_parameters()}


def _reached(nodes: Iterable[Any], *, into: bool = False) -> tuple[list[Tensor], list[Any]]:
    """Return the leaves that nodes reach without an operator that has no slope, and the operators of that kind.

    into: go through these operators as well.
    """
    waiting, seen = [*nodes], set[Any]()
    leaves: list[Tensor] = []
    edge: list[Any] = []
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        if node.name() in _NODES and not into:
            edge.append(node)
        else:
            waiting += [each for each, _ in node.next_functions if each is not None]
    return leaves, edge


def _watched(owner: Any, name: str, seen: Callable[[Any], Any]) -> Undo:
    """Replace a function by one that shows its result; return a function that restores it."""
    own = getattr(owner, name)

    @passed_through
    @functools.wraps(own)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        seen(result)
        return result

    return replaced(owner, name, watched)
