"""Count of the work that a function does, equal on every machine: bytecodes that ran, and elements of arrays.

A clock cannot fail a test for a quadratic loop, since machines differ and other programs run. The count can. It covers
loops of Python, operations of NumPy on arrays that `counted` has wrapped, and their results. It does not cover loops of
C over a list (`list.index`, `sum`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np


class Work:
    """Running total of one measurement."""

    def __init__(self) -> None:
        self.bytecodes = 0
        self.elements = 0

    @property
    def total(self) -> int:
        return self.bytecodes + self.elements


_now = Work()


@contextmanager
def counting() -> Iterator[Work]:
    """Count the work inside, in this thread."""
    global _now
    work, before, tracer = Work(), _now, sys.gettrace()

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return on_event

    def on_event(frame: FrameType, event: str, argument: object) -> Any:  # called for each bytecode, so it does little
        if event == "opcode":
            work.bytecodes += 1
        return on_event

    _now = work
    # Python 3.12 sends opcode events only to tracers that are set after a frame has requested them.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(on_call)
    try:
        yield work
    finally:
        sys.settrace(tracer)
        _now = before


def work_of(function: Callable[..., object], *inputs: Any) -> int:
    """Return the work of one call, after a first call that fills caches."""
    function(*inputs)
    with counting() as work:
        function(*inputs)
    return work.total


class Counted(np.ndarray[Any, Any]):
    """Array that counts the elements of each operation on it, as do its results."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return _counted_call(getattr(ufunc, method), inputs, options)

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        return _counted_call(function, inputs, options)

    def __getitem__(self, index: Any) -> Any:
        found = np.asarray(self)[_plain(index)]
        # A slice is a view, which reads nothing until it is used.
        _now.elements += 0 if isinstance(index, slice) else max(np.size(index), np.size(found))
        return counted(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        _now.elements += max(np.size(index), np.size(value))
        np.asarray(self)[_plain(index)] = _plain(value)

    def __iter__(self) -> Iterator[Any]:
        _now.elements += self.size
        return iter(np.asarray(self))


def _counting_method(name: str) -> Callable[..., Any]:
    plain = getattr(np.ndarray, name)

    def method(self: Counted, *inputs: Any, **options: Any) -> Any:
        return _counted_call(plain, (self, *inputs), options)

    return method


for _name in ("all", "any", "argsort", "astype", "copy", "cumsum", "max", "min", "searchsorted", "sum", "tolist"):
    setattr(Counted, _name, _counting_method(_name))


def _counted_call(function: Callable[..., Any], inputs: Iterable[Any], options: dict[str, Any]) -> Any:
    inputs = _plain(tuple(inputs))
    found = function(*inputs, **{name: _plain(value) for name, value in options.items()})
    _now.elements += max(_elements(inputs), _elements(found))
    return counted(found)


def _elements(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.size
    return sum(map(_elements, value)) if isinstance(value, tuple | list) and len(value) < 10 else 0


def _plain(value: Any) -> Any:
    if isinstance(value, Counted):
        return value.view(np.ndarray)
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def counted(value: Any) -> Any:
    """Return the array, or the arrays of a tuple or list, as counting ones."""
    if isinstance(value, np.ndarray):
        return value.view(Counted)
    return type(value)(map(counted, value)) if type(value) in (tuple, list) else value
