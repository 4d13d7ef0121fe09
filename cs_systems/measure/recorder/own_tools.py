"""Profilers and tracers of the recorded program itself, which take precedence over a recorder's.

A process has one torch.profiler, one CUDA memory history and one capture range of nsys at a time. If the program uses
one of them, a recorder waits or stops its own, and adds a caveat.
"""

from __future__ import annotations

import functools
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerAction
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from cs_systems.instrument.compiler import passed_through, replaced

PROFILER, HISTORY = "torch.profiler", "CUDA memory history"
COUNTER, COUNTS = "FlopCounterMode", "torch.utils.flop_counter"  # the module, which imports triton, is not loaded here
# tool, as named by a Profiler → function that returns whether it is active in this process
TOOLS: dict[str, Callable[[], bool]] = {
    PROFILER: lambda: bool(torch._C._autograd._profiler_enabled()),
    # PyTorch crashes on this query before its allocator exists
    HISTORY: lambda: torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled(),
}


class OwnTools:
    """Observer of the tools that the program begins and ends.

    Attributes:
        gives_way: called before the program begins a tool that a profiler of the recorder is using.
        captures_held: suppressed calls by the program that would have begun or ended nsys's capture.
    """

    def __init__(self) -> None:
        self.gives_way: Callable[[], object] | None = None
        self.captures_held = 0
        self._used_by_us: str | None = None  # the tool that the recorder's active profiler uses
        self._we_call = False
        # the program has prepared a profiler, which it will enable without another preparation
        self._is_profiler_prepared = False
        self._begun: set[str] = set()
        self._installed = ExitStack()

    def watch(self) -> None:
        """Begin to observe; `close` ends it."""
        profiler: Any = torch.autograd.profiler
        self._precede(profiler, "_prepare_profiler", lambda: self._profiler_is_prepared(True), PROFILER)
        self._precede(profiler, "_enable_profiler", lambda: self._profiler_is_prepared(True), PROFILER)
        self._precede(profiler, "_disable_profiler", lambda: self._profiler_is_prepared(False), None)
        self._precede(torch.cuda.memory, "_record_memory_history", lambda: None, HISTORY)
        enter: Any = TorchDispatchMode.__enter__

        @passed_through
        @functools.wraps(enter)
        def entered(mode: TorchDispatchMode) -> Any:
            if type(mode).__module__ == COUNTS:
                self._begun.add(COUNTER)
            return enter(mode)

        self._installed.callback(replaced(TorchDispatchMode, "__enter__", entered))

    def find_prepared(self) -> None:
        """Find a torch.profiler that the program prepared before the observation began."""
        profilers = (each for each in gc.get_objects() if issubclass(type(each), torch.profiler.profile))
        self._is_profiler_prepared = any(each.current_action is ProfilerAction.WARMUP for each in profilers)

    def hold_captures(self) -> None:
        """Replace the program's calls of cudaProfilerStart and cudaProfilerStop by a counter."""
        cudart: Any = torch.cuda.cudart()
        for name in ("cudaProfilerStart", "cudaProfilerStop"):
            self._installed.callback(replaced(cudart, name, self._held(cudart, getattr(cudart, name))))

    def close(self) -> None:
        self._installed.close()

    def in_use(self, tool: str | None) -> bool:
        """Return whether the program uses this tool now, so that the recorder's profiler would disturb it."""
        if tool is None or tool == self._used_by_us:
            return False
        return (tool == PROFILER and self._is_profiler_prepared) or TOOLS[tool]()

    def slowing(self) -> set[str]:
        """Return the program's active tools that make its steps slower."""
        tracers = {"sys.settrace": sys.gettrace(), "sys.setprofile": sys.getprofile()}
        found = {name for name, tracer in tracers.items() if tracer is not None}
        found |= {"tracemalloc"} if tracemalloc.is_tracing() else set()
        modes = _get_current_dispatch_mode_stack()
        found |= {COUNTER} if any(type(mode).__module__ == COUNTS for mode in modes) else set()
        return found | {tool for tool, is_active in TOOLS.items() if tool != self._used_by_us and is_active()}

    def begun(self) -> set[str]:
        """Return the program's tools that began since the last call, though they may have ended within their step."""
        begun, self._begun = self._begun, set()
        return begun

    @contextmanager
    def ours(self, tool: str | None) -> Iterator[None]:
        """Treat calls inside as the recorder's; afterwards its profiler uses this tool, or none."""
        self._we_call = True
        try:
            yield
            self._used_by_us = tool
        finally:
            self._we_call = False

    def _profiler_is_prepared(self, prepared: bool) -> None:
        self._is_profiler_prepared = prepared

    def _precede(self, owner: Any, name: str, note: Callable[[], object], tool: str | None) -> None:
        """Call `note` before the program calls a function, after stopping the recorder's profiler on this tool."""
        function = getattr(owner, name)

        @passed_through
        @functools.wraps(function)
        def preceded(*args: Any, **kwargs: Any) -> Any:
            if not self._we_call:
                if tool is not None and tool == self._used_by_us and self.gives_way is not None:
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
