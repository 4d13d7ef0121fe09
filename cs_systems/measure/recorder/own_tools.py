"""Profilers and tracers of the recorded program itself, which come before those of a recorder.

A process has one torch.profiler, one CUDA memory history and one capture range of nsys at a time. Where the program
uses one of them, a recorder waits or gives way, and says so.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerAction

from cs_systems.instrument.compiler import passed_through, replaced

TOOLS = {"kineto": "torch.profiler", "memory_snapshot": "CUDA memory history"}  # what each profiler uses


def _is_active(profiler: str) -> bool:
    """Return whether the tool that a profiler uses is active in this process."""
    if profiler == "kineto":
        return bool(torch._C._autograd._profiler_enabled())
    # PyTorch crashes if it is asked before its allocator exists.
    return profiler == "memory_snapshot" and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()


class OwnTools:
    """Watch of the tools that the program begins and ends.

    Attributes:
        gives_way: called before the program begins a tool that our profiler uses at the moment.
        captures_held: calls by the program that would have begun or ended what nsys captures.
    """

    def __init__(self) -> None:
        self.gives_way: Callable[[], object] | None = None
        self.captures_held = 0
        self._used_by_us: str | None = None  # the profiler whose tool is ours at the moment
        self._we_call = False
        self._is_profiler_prepared = False  # by the program: it will be enabled without another preparation
        self._installed = ExitStack()

    def watch(self) -> None:
        """Begin to watch; `close` ends it."""
        profiler: Any = torch.autograd.profiler
        self._precede(profiler, "_prepare_profiler", lambda: self._profiler_is_prepared(True), "kineto")
        self._precede(profiler, "_enable_profiler", lambda: self._profiler_is_prepared(True), "kineto")
        self._precede(profiler, "_disable_profiler", lambda: self._profiler_is_prepared(False), None)
        self._precede(torch.cuda.memory, "_record_memory_history", lambda: None, "memory_snapshot")

    def find_prepared(self) -> None:
        """Find a torch.profiler that the program prepared before it was watched."""
        profilers = (each for each in gc.get_objects() if issubclass(type(each), torch.profiler.profile))
        self._is_profiler_prepared = any(each.current_action is ProfilerAction.WARMUP for each in profilers)

    def hold_captures(self) -> None:
        """Let the program's calls of cudaProfilerStart and cudaProfilerStop do nothing, but count them."""
        cudart: Any = torch.cuda.cudart()
        for name in ("cudaProfilerStart", "cudaProfilerStop"):
            self._installed.callback(replaced(cudart, name, self._held(cudart, getattr(cudart, name))))

    def close(self) -> None:
        self._installed.close()

    def in_use(self, profiler: str) -> str | None:
        """Return the tool of the program that a profiler of ours would disturb at this moment, or None."""
        if profiler == self._used_by_us:
            return None
        is_prepared = profiler == "kineto" and self._is_profiler_prepared
        return TOOLS[profiler] if is_prepared or _is_active(profiler) else None

    def slowing(self) -> set[str]:
        """Return the tools of the program that are active now and make its steps slower."""
        tracers = {"sys.settrace": sys.gettrace(), "sys.setprofile": sys.getprofile()}
        found = {name for name, tracer in tracers.items() if tracer is not None}
        return found | {TOOLS[profiler] for profiler in TOOLS if profiler != self._used_by_us and _is_active(profiler)}

    @contextmanager
    def ours(self, profiler: str | None) -> Iterator[None]:
        """Take the calls inside for ours, after which this profiler of ours is active, or none."""
        self._we_call = True
        try:
            yield
            self._used_by_us = profiler
        finally:
            self._we_call = False

    def _profiler_is_prepared(self, prepared: bool) -> None:
        self._is_profiler_prepared = prepared

    def _precede(self, owner: Any, name: str, note: Callable[[], object], profiler: str | None) -> None:
        """Call `note` before each call of a function by the program, after giving way with this profiler of ours."""
        function = getattr(owner, name)

        @passed_through
        @functools.wraps(function)
        def preceded(*args: Any, **kwargs: Any) -> Any:
            if not self._we_call:
                if profiler is not None and profiler == self._used_by_us and self.gives_way is not None:
                    self.gives_way()
                note()
            return function(*args, **kwargs)

        self._installed.callback(replaced(owner, name, preceded))

    def _held(self, cudart: Any, function: Callable[[], Any]) -> Callable[[], Any]:
        def held() -> Any:
            if self._we_call:
                return function()
            self.captures_held += 1
            return cudart.cudaError.success

        return held
