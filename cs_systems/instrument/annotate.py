"""Named ranges for profilers: NVTX ranges, `record_function` contexts, or nothing.

It costs nothing when off: `annotate` then returns one shared null context. Modules are annotated from outside, by
`hooks`. The code has `with annotate(...)` only around phases, and inside attention algorithms, where no module boundary
separates scores, softmax and value. Code that torch.compile generates sets the ranges of the next kernel between
kernels: see `compiled_ranges`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.fx.traceback

STEP = "step"  # name of the range around all phases of a step
TRACED = "cs_systems.annotate"
Label = tuple[str, ...]  # names of ranges that are open together, outermost first


class Ranges(Protocol):
    """Destination of ranges. Ranges nest within a thread, and each thread has its own."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


_OFF: AbstractContextManager[None] = nullcontext()
_listener: Ranges | None = None
_tracing_names = False


def annotate(name: str) -> AbstractContextManager[None]:
    """Return a context manager that marks the code inside as `name` for the active profiler, if any.

    A range cannot be traced inside torch.compile: the traced operators keep its name only while `tracing_names` is
    active. The function tests for compilation first, so that compiled code does not depend on the listener and is not
    compiled again when one is set.
    """
    if torch.compiler.is_compiling():
        return torch.fx.traceback.annotate({TRACED: name}) if _tracing_names else _OFF
    return _OFF if _listener is None else _Range(name, _listener)


class _Range:
    __slots__ = ("name", "ranges")

    def __init__(self, name: str, ranges: Ranges) -> None:
        self.name, self.ranges = name, ranges

    def __enter__(self) -> None:
        self.ranges.push(self.name)

    def __exit__(self, *_: object) -> None:
        self.ranges.pop()


@contextmanager
def listening(ranges: Ranges) -> Iterator[None]:
    """Send annotations inside the block to `ranges`."""
    global _listener
    before, _listener = _listener, ranges
    try:
        yield
    finally:
        _listener = before


class OpenLabel(threading.local):
    """Ranges that are open in a thread, as one label."""

    def __init__(self) -> None:
        self.now: Label = ()

    def switch(self, label: Label, ranges: Ranges) -> None:
        """Make `label` the open ranges of this thread: close other ranges, and open the missing ones."""
        common = 0
        while common < min(len(self.now), len(label)) and self.now[common] == label[common]:
            common += 1
        for _ in self.now[common:]:
            ranges.pop()
        for name in label[common:]:
            ranges.push(name)
        self.now = label


_of_compiled_code = OpenLabel()


def mark(*label: str) -> None:
    """Assign the kernels that this thread launches from now on to `label`.

    Compiled code calls it between its kernels. A name that begins with a dot is a module path relative to the compiled
    module, because the same code may run for several modules.
    """
    if _listener is not None:
        if label and label[0].startswith("."):
            label = _absolute(label, _listener)
        _of_compiled_code.switch(label, _listener)


def _absolute(label: Label, ranges: Ranges) -> Label:
    region, has_range = getattr(ranges, "region", lambda: ("", False))()
    if label[0] == ".":  # the range of the compiled module itself
        return label[1:] if has_range or not region else (region, *label[1:])
    return (f"{region}{label[0]}".removeprefix("."), *label[1:])


def closing_marks(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` so that the last label it marks is closed when it returns or raises."""

    def closes(*args: Any) -> Any:
        try:
            return call(*args)
        finally:
            mark()

    return closes


@contextmanager
def tracing_names() -> Iterator[None]:
    """Make torch.compile record, for each operator it traces inside, the name of the innermost open `annotate`.

    The name is stored under TRACED in the node's metadata `custom`.
    """
    global _tracing_names
    before, _tracing_names = _tracing_names, True
    try:
        yield
    finally:
        _tracing_names = before


class NvtxRanges:
    """NVTX ranges for nsys and ncu, through torch if built for CUDA, else through the package nvtx."""

    def __init__(self) -> None:
        if torch.version.cuda is not None:
            self.push, self.pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
        else:
            import nvtx

            self.push, self.pop = nvtx.push_range, nvtx.pop_range


class _TorchRanges:
    """Functions of torch.cuda.nvtx on a PyTorch without CUDA: ranges of the package nvtx, or none without it."""

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError:
            self.rangePushA = self.rangePop = self.rangeStartA = self.rangeEnd = self.markA = _none
        else:
            self.rangePushA, self.rangePop = nvtx.push_range, nvtx.pop_range
            self.rangeStartA, self.rangeEnd, self.markA = nvtx.start_range, nvtx.end_range, nvtx.mark


def _none(*_: Any) -> None:
    """Do nothing, as a range that nobody records."""


@contextmanager
def torch_ranges() -> Iterator[None]:
    """Let ranges of torch.cuda.nvtx work inside, also on a PyTorch without CUDA, where they raise.

    Code that was written for a GPU has them, such as a course's, and computes the same without them.
    """
    functions: Any = torch.cuda.nvtx
    before = functions._nvtx
    if torch.version.cuda is None and torch.version.hip is None:
        functions._nvtx = _TorchRanges()
    try:
        yield
    finally:
        functions._nvtx = before


def hidden_from_modes() -> AbstractContextManager[None]:
    """Return a context that hides torch's operations inside from the program's modes and from torch.jit.

    A mode of the program could count its operators, for example.
    """
    has_modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return _hidden() if has_modes or torch._C._get_tracing_state() is not None else _OFF


@contextmanager
def _hidden() -> Iterator[None]:
    jit: Any = torch._C
    traced = jit._get_tracing_state()
    if traced is not None:
        jit._set_tracing_state(None)
    try:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield
    finally:
        if traced is not None:
            jit._set_tracing_state(traced)


class RecordFunctionRanges:
    """Ranges for torch.profiler."""

    def __init__(self) -> None:
        self._thread = _Opened()

    def push(self, name: str) -> None:
        context = torch.profiler.record_function(name)
        with hidden_from_modes():
            context.__enter__()
        self._thread.contexts.append(context)

    def pop(self) -> None:
        with hidden_from_modes():
            self._thread.contexts.pop().__exit__(None, None, None)


class _Opened(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Any] = []
