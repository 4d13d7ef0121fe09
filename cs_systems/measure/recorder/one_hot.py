"""Linear layers that multiply one-hot rows, or others of which hardly any number differs from 0.

Only inputs without gradients count: data, not activations. Rows are read in a few untimed steps.
"""

from __future__ import annotations

import math
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import ONE_HOT, OneHotRow
from cs_systems.measure.recorder.graph_size import uses_of_leaves
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.module_calls import CallObserver, SeenCall
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of

FEWEST_COLUMNS, MOST_SHARE = 256, 0.01  # numbers in a row, and the largest share of them that is not 0
FEW_ROWS, MOST_ROWS = 16, 1024  # rows that are read first, and of an input that looks one-hot
MOST_ELEMENTS = 1 << 22  # that are read, or copied
ROUNDS = 3  # of each product; the fastest counts
LEAST_USED = 0.5  # least share of the rows that are not all 0, such as padding


class Nonzeros(NamedTuple):
    """Most numbers in a row that are not 0, and whether all of these are 1."""

    most: int
    is_ones: bool


@dataclass
class _Layer:
    """Calls of a layer, in one step or several. `is_apart`: each had one-hot rows, and nothing else uses the weight."""

    module: str
    width: int
    weight: weakref.ref[Tensor]
    nonzeros: int = 0
    is_ones: bool = True
    is_apart: bool = True
    rows: int = 0
    calls: int = 0
    time_s: float = 0.0
    recorded_s: float = 0.0  # time of calls after which backward computes a gradient of the weight
    steps: int = 0
    line: Line | None = None

    def add(self, other: _Layer) -> None:
        """Add the calls of a step."""
        self.nonzeros, self.is_ones = max(self.nonzeros, other.nonzeros), self.is_ones and other.is_ones
        self.rows, self.time_s = self.rows + other.rows, self.time_s + other.time_s
        self.recorded_s, self.steps = self.recorded_s + other.recorded_s, self.steps + 1
        self.line = other.line or self.line


class OneHot(CallObserver):
    """Observer of the inputs of linear layers."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._found: dict[int, _Layer] = {}
        self._ratios: dict[int, float] = {}
        self._steps, self._modules_s = 0, 0.0
        self.step_failed()

    def step_failed(self) -> None:
        self._now: dict[int, _Layer] = {}  # of this step, by the identity of the weight

    def begins(self, period: Period) -> None:
        self.is_looking = period is Period.WARMUP
        self.step_failed()

    @as_guest
    def call_seen(self, call: SeenCall) -> None:
        weight = _weight_of(call.module)
        if weight is None:
            return
        layer = self._now.get(id(weight))
        inputs = _first_input(call)
        found = None if inputs is None else nonzeros(inputs)
        if layer is None and found is not None:
            layer = self._now[id(weight)] = _Layer(call.named(), weight.shape[1], weakref.ref(weight))
        if layer is None or inputs is None or found is None:
            if layer is not None:
                layer.is_apart = False
            return
        layer.nonzeros, layer.is_ones = max(layer.nonzeros, found.most), layer.is_ones and found.is_ones
        layer.calls, layer.rows = layer.calls + 1, layer.rows + math.prod(inputs.shape[:-1])
        layer.time_s += call.time_s
        if weight.requires_grad and isinstance(call.result, Tensor) and call.result.requires_grad:
            layer.recorded_s += call.time_s
            if id(weight) not in self._ratios:
                self._ratios[id(weight)] = _backward_ratio(inputs, weight.detach())
        layer.line = own_lines(sys._getframe(1))[1] or layer.line

    def look_before_backward(self, roots: Any) -> None:
        """Find layers with a weight that also something else uses, such as a decoder or a penalty."""
        if not self._now:
            return
        used = uses_of_leaves(roots)
        for which, layer in self._now.items():
            layer.is_apart &= used[which] <= layer.calls

    @as_guest
    def step_seen(self, modules_s: float) -> None:
        self._steps += 1
        self._modules_s += modules_s
        for which, layer in self._now.items():
            known = self._found.get(which)
            if known is None or known.weight() is None:
                known = self._found[which] = _Layer(layer.module, layer.width, layer.weight)
            if layer.is_apart:
                known.add(layer)
        self._now = {}

    def end(self) -> None:
        self.keep(ONE_HOT, [self._row(which, each) for which, each in self._found.items() if each.steps])
        self._found, self._ratios = {}, {}

    def _row(self, which: int, layer: _Layer) -> OneHotRow:
        held = parameters_of(*self._subject.optimizers)
        of_layer = sum(p.numel() for p in held if id(p) == which)
        ratio = self._ratios.get(which, 0.0)
        return {
            "module": layer.module,
            "width": layer.width,
            "nonzeros": layer.nonzeros,
            "is_ones": layer.is_ones,
            "rows": round(layer.rows / layer.steps),
            "steps": layer.steps,
            "of_steps": self._steps,
            "time_s": layer.time_s / self._steps,
            "share": _ratio(layer.time_s, self._modules_s),
            "backward_ratio": ratio * _ratio(layer.recorded_s, layer.time_s),
            "elements_share": _ratio(of_layer, sum(p.numel() for p in held)),
            "function": function_of(layer.line) if layer.line else None,
            "place": place_of(layer.line) if layer.line else None,
        }


def _ratio(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _backward_ratio(inputs: Tensor, weight: Tensor) -> float:
    """Return the time of the product that gives a weight's gradient, in times of forward's product."""
    rows = inputs.detach().flatten(0, -2)
    if rows.dtype != weight.dtype:  # under autocast
        return 1.0
    gradient = rows @ weight.t()
    return _fastest_s(lambda: gradient.t() @ rows) / _fastest_s(lambda: rows @ weight.t())


def _fastest_s(product: Callable[[], Tensor]) -> float:
    least_s = math.inf
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        product()
        least_s = min(least_s, time.perf_counter() - begin_s)
    return least_s


def _weight_of(module: nn.Module) -> Tensor | None:
    """Return the weight of a wide linear layer that computes nothing else; None for other modules."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return None
    weight = module._parameters.get("weight")  # none if a parametrization computes it
    is_wide = weight is not None and weight.dim() == 2 and weight.shape[1] >= FEWEST_COLUMNS
    return weight if is_wide else None


def _first_input(call: SeenCall) -> Tensor | None:
    positional, named = call.inputs
    inputs: Iterable[Any] = (*positional, *named.values())
    return next((each for each in inputs if isinstance(each, Tensor)), None)


def nonzeros(inputs: Tensor) -> Nonzeros | None:
    """Return the numbers that are not 0 if they are few in each row, by a sample of the rows; None otherwise."""
    is_plain = type(inputs) is Tensor and inputs.layout is torch.strided and inputs.is_floating_point()
    if not is_plain or inputs.requires_grad or inputs.dim() < 2 or not inputs.numel():
        return None
    if (width := inputs.shape[-1]) < FEWEST_COLUMNS:
        return None
    if not inputs.is_contiguous() and inputs.numel() > MOST_ELEMENTS:
        return None
    rows = inputs.detach().flatten(0, -2)
    for most in (FEW_ROWS, max(FEW_ROWS, min(MOST_ROWS, MOST_ELEMENTS // width))):
        some = rows[torch.tensor(random.Random(0).sample(range(len(rows)), min(most, len(rows))))]
        counts = some.count_nonzero(dim=1)
        if int(counts.max()) > MOST_SHARE * width:
            return None
    if int(counts.count_nonzero()) < LEAST_USED * len(some):
        return None
    # where all of them are 1, their sum and the sum of their squares are their number
    is_ones = bool((some.sum(dim=1) == counts).all()) and bool((some.square().sum(dim=1) == counts).all())
    return Nonzeros(int(counts.max()), is_ones)
