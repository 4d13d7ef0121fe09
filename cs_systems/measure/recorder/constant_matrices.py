"""Decompositions and inverses of matrices that are the same in each step, so that one would be enough.

In a few warm-up steps on a CPU, and a few after the timing, the functions of torch that decompose a matrix are replaced
by ones that time it, and compare matrices by the sums of their elements and some of them. Calls at the same place of
the program are compared between steps: those after the timing show most matrices that change, but rarely.

Matrices with gradients are left out: they depend on parameters, as those of a Gaussian process do. So are calls inside
an optimizer or backward, and a process that compiles.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import CONSTANT_MATRICES, ConstantMatrixRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.gradients import some_values
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Hidden, Period, Replacing, is_profiled
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.tracker import Tracker

MOST_STEPS, FEWEST_STEPS = 3, 3  # of each period; in all
MOST_CALLS = 500  # of a step
MOST_VALUES = 1024  # compared elements of a matrix, next to its sums
FEWEST_ELEMENTS = 64  # of a matrix, or of a batch of them
OF_LINALG = (
    "cholesky cholesky_ex eig eigh eigvals eigvalsh inv inv_ex ldl_factor lu lu_factor lu_factor_ex matrix_exp pinv qr "
    "svd svdvals"
)
OF_TORCH = "cholesky inverse matrix_exp pinverse qr svd"  # also methods of a tensor
_Place = tuple[str, Line]


class _Call(NamedTuple):
    """Call of a function; content: what is compared of its matrix, or None if it may be another one in each step."""

    content: tuple[Any, ...] | None
    shape: tuple[int, ...]
    time_s: float


class ConstantMatrices(Replacing):
    """Observer of the decompositions in a few warm-up steps.

    hidden: context for looks. compilations: the number of compilations of this process so far.
    """

    def __init__(self, tracker: Tracker, hidden: Hidden, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._tracker, self._hidden, self._compilations = tracker, hidden, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[dict[_Place, list[_Call]]] = []
        self._is_part = False
        self._before: int | None = None  # steps of the period before, once the later one has begun
        self._start()

    def _start(self) -> None:
        self._calls: dict[_Place, list[_Call]] = {}
        self._count, self._is_updated = 0, False

    def begins(self, period: Period) -> None:
        super().begins(period)
        may_look = not (self._tracker.is_cuda or self._compilations())
        self.is_looking = self.is_looking and may_look
        if self.is_looking:
            is_later = period is Period.SAMPLED
            self._before = len(self._steps) if is_later else None
            self._is_part = is_later  # this period may begin within a step
            self._start()
            self._process = os.getpid()  # a worker of a data loader inherits the replaced functions
            self._installed = Observation()
            for owner, name, shown in _functions():
                self._installed.add(partial(_timed, owner, name, partial(self._called, name=shown)), is_guarded=True)

    def look_after_backward(self) -> None:
        self._is_updated = True

    def look_after_step(self) -> None:
        super().look_after_step()
        if self._is_updated and self._count < MOST_CALLS and not self._is_part:
            self._steps.append(self._calls)
        self._is_part = False
        self._start()
        if len(self._steps) - (self._before or 0) >= MOST_STEPS or self._compilations():
            self.stop_looking()

    def _observes(self) -> bool:
        if not (self.is_looking and self._tracker.observes()) or self._tracker.is_open(BACKWARD, OPTIMIZER):
            return False
        if self._count >= MOST_CALLS or os.getpid() != self._process or is_tracing() or is_profiled():
            return False
        return bool(torch._C._functorch.peek_interpreter_stack() is None)  # tensors of torch.func hide their elements

    @as_guest
    def _called(self, time_s: float, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
        if not self._observes():
            return
        matrix = args[0] if args else kwargs.get("A", kwargs.get("input"))
        _, line = own_lines(sys._getframe(1))
        if line is None or not isinstance(matrix, Tensor) or matrix.numel() < FEWEST_ELEMENTS:
            return
        self._count += 1
        with self._hidden():
            others = tuple(map(repr, (*args[1:], *sorted(kwargs)))) if len(kwargs) + len(args) > 1 else ()
            content = None if (of := _content(matrix)) is None else (*of, others)
            self._calls.setdefault((name, line), []).append(_Call(content, tuple(matrix.shape), time_s))

    def end(self) -> None:
        is_later = self._before and len(self._steps) > self._before
        rows = [row for place in (self._steps[0] if is_later else ()) if (row := self._row(place))]
        self.keep(CONSTANT_MATRICES, rows)
        self._steps.clear()

    def _row(self, place: _Place) -> ConstantMatrixRow | None:
        """Return the row of a place that decomposes the same matrices in each step."""
        steps = [step.get(place, []) for step in self._steps]
        contents = [{call.content for call in step} for step in steps]
        if len(steps) < FEWEST_STEPS or None in contents[0] or any(each != contents[0] for each in contents):
            return None
        (name, line), last = place, steps[-1]
        return {
            "calls_of": name,
            "shape": " × ".join(map(str, last[-1].shape)),
            "matrices": len(contents[0]),
            "calls": len(last),
            "steps": len(steps),
            "time_s": median(sum(call.time_s for call in step) for step in steps),
            "function": function_of(line),
            "place": place_of(line),
        }


def _functions() -> Iterator[tuple[Any, str, str]]:
    """Yield the functions to replace: owner, name, and the name in words."""
    yield from ((torch.linalg, name, f"torch.linalg.{name}") for name in OF_LINALG.split())
    for name in OF_TORCH.split():
        yield torch, name, f"torch.{name}"
        yield Tensor, name, f"Tensor.{name}"


def _timed(owner: Any, name: str, seen: Callable[..., Any]) -> Undo:
    """Replace a function by one that shows its time and arguments; return a function that restores it."""
    own = getattr(owner, name)

    @passed_through
    @functools.wraps(own)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = own(*args, **kwargs)
        seen(time.perf_counter() - begin_s, args, kwargs)
        return result

    return replaced(owner, name, timed)


def _content(matrix: Tensor) -> tuple[Any, ...] | None:
    """Return what is compared of a matrix; None if it has gradients, or cannot be read."""
    is_plain = type(matrix) is Tensor and matrix.layout is torch.strided and not matrix.is_quantized
    if not is_plain or matrix.requires_grad or matrix.is_complex():
        return None
    values = some_values(matrix.contiguous(), MOST_VALUES)
    total, squares = matrix.sum(dtype=torch.float64), matrix.double().square().sum()
    return tuple(matrix.shape), matrix.dtype, hash(values), total.item(), squares.item()
