"""Time of multivariate normal distributions with diagonal matrices: of independent numbers with a full matrix.

MultivariateNormal factorises its covariance matrix when it is made, and solves a triangular system in log_prob. In a
few steps on a CPU its methods are timed, and the operators of their backward; the matrices are read after the step.
Only matrices with nothing but zeros off the diagonal count, in all steps that are looked at, and none with a trained
factor of that shape: it may leave that form later.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from cs_systems.analysis.comparison.loop_findings import COVARIANCES, CovariancesRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.graph_size import nodes_below
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing, is_profiled
from cs_systems.measure.recorder.operator_times import OperatorTimer
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.recorder.tracker import Tracker

FEWEST_STEPS = 2
MOST_MATRICES = 8  # of a step that are read, for each line
_GIVEN = ("covariance_matrix", "precision_matrix", "scale_tril")  # in the order of the arguments, after the mean
_METHODS = ("__init__", "log_prob", "entropy", "rsample")


class Covariances(Replacing):
    """Observer of multivariate normal distributions in a few steps on a CPU.

    compilations: the number of compilations of this process so far.
    """

    def __init__(self, subject: Subject, tracker: Tracker, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._subject, self._tracker, self._compilations = subject, tracker, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[Counter[Line]] = []  # seconds by the line that makes the distribution
        self._made: dict[Line, tuple[str, int]] = {}  # what it gets, and its rows
        self._full: set[Line] = set()  # lines with a matrix that is not diagonal
        self._lines: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        self._timers: list[tuple[Line, OperatorTimer]] = []
        self._start()

    def _start(self) -> None:
        self._times_s, self._has_backward = Counter[Line](), False
        self._operators: dict[int, Line] = {}  # by their number
        self._timed: set[int] = set()  # numbers of those with a timer; further passes may go through the same graph
        self._matrices: list[tuple[Line, Tensor]] = []
        while self._timers:
            self._timers.pop()[1].remove()

    def begins(self, period: Period) -> None:
        super().begins(period)
        self.is_looking = self.is_looking and not (self._subject.device.is_cuda or self._compilations())
        if self.is_looking:
            self._start()
            self._installed = Observation()
            for name in _METHODS:
                self._installed.add(partial(_watched, name, self._begins, self._ended), is_guarded=True)

    @as_guest
    def _begins(self) -> tuple[int, float] | None:
        """Begin a call: return the number of the next operator and the time; None if the call is not observed."""
        if not (self.is_looking and self._tracker.observes()) or is_tracing() or is_profiled():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        return torch._C._autograd._get_sequence_nr(), time.perf_counter()

    @as_guest
    def _ended(self, name: str, begun: tuple[int, float] | None, args: tuple[Any, ...], known: dict[str, Any]) -> None:
        if begun is None:
            return
        lasted_s, of = time.perf_counter() - begun[1], args[0]
        operators = range(begun[0], torch._C._autograd._get_sequence_nr())
        if name == "__init__" and (made := own_lines(sys._getframe(1))[1]) is not None:
            self._lines[of] = made
            given = {**dict(zip(_GIVEN, args[2:], strict=False)), **known}
            which, matrix = next(((each, given[each]) for each in _GIVEN if given.get(each) is not None), ("", None))
            if type(matrix) is Tensor:
                self._made[made] = which, matrix.shape[-1]
                if sum(line is made or line == made for line, _ in self._matrices) < MOST_MATRICES:
                    self._matrices.append((made, matrix.detach()))
                    if _has_trained_factor(matrix):
                        self._full.add(made)
        if (line := self._lines.get(of)) is not None:
            self._times_s[line] += lasted_s  # type: ignore[assignment]
            self._operators |= dict.fromkeys(operators, line)

    def look_before_backward(self, roots: Any) -> None:
        self._has_backward = True
        if self._operators:
            for node in nodes_below(roots):
                number = -1 if hasattr(node, "variable") else node._sequence_nr()
                if (line := self._operators.get(number)) is not None and number not in self._timed:
                    self._timed.add(number)
                    self._timers.append((line, OperatorTimer(node)))

    def look_after_step(self) -> None:
        super().look_after_step()
        for line, matrix in self._matrices:
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)
            if matrix.shape[-1] < 2 or bool((matrix.count_nonzero() != diagonal.count_nonzero()).any()):
                self._full.add(line)
        for line, timer in self._timers:
            self._times_s[line] += timer.time_s  # type: ignore[assignment]
        if self._has_backward:
            self._steps.append(self._times_s)
        self._start()
        if self._compilations():
            self.stop_looking()

    def end(self) -> None:
        if len(self._steps) >= FEWEST_STEPS:
            self.keep(COVARIANCES, [self._row(line) for line in self._made if line not in self._full])
        self._steps.clear()
        self._start()

    def _row(self, line: Line) -> CovariancesRow:
        given, rows = self._made[line]
        return {
            "given": given,
            "rows": rows,
            "function": function_of(line),
            "place": place_of(line),
            "time_s": sorted(step[line] for step in self._steps)[len(self._steps) // 4],  # others make some longer
            "steps": len(self._steps),
        }


def _has_trained_factor(matrix: Tensor) -> bool:
    """Return whether a matrix is computed from a parameter of its shape, such as a factor that begins diagonal."""
    leaves = (
        (node.variable for node in nodes_below(matrix) if hasattr(node, "variable")) if matrix.requires_grad else ()
    )
    return any(leaf.shape[-2:] == matrix.shape[-2:] for leaf in leaves)


def _watched(name: str, begins: Callable[[], Any], ended: Callable[..., Any]) -> Undo:
    """Replace a method of MultivariateNormal by one that shows when it begins and ends."""
    own = vars(MultivariateNormal)[name]

    @passed_through
    @functools.wraps(own)
    def watched(*args: Any, **kwargs: Any) -> Any:
        begun = begins()
        result = own(*args, **kwargs)
        ended(name, begun, args, kwargs)
        return result

    return replaced(MultivariateNormal, name, watched)
