"""Counters read before and after a step, outside its timing, that can explain a slow step."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from cs_systems.core.caveats import GraphBreakRow
from cs_systems.core.printable import plain
from cs_systems.machine.device import Device
from cs_systems.machine.environment import sm_clock_hz

_OBSERVERS = {
    Path(__file__).parents[1] / name
    for name in ("instrument", "measure/profilers", "measure/recorder", "measure/runtime")
}
MOST_BREAKS, LONGEST_REASON = 5, 200  # limits of graph-break rows in a record, and of characters of a reason


@dataclass(frozen=True)
class Reading:
    device_mallocs: int | None
    compiles: int
    compile_s: float


class Since(TypedDict):
    """Fields of a `Sample` that come from counters."""

    device_mallocs: int | None
    compiles: int
    compile_s: float
    sm_clock_hz: float | None


class Probes:
    """Counters of one device's allocator and clock, and of the compilers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.triton = _TritonCompilations.shared() if device.is_cuda else None

    def compilations(self) -> tuple[int, float]:
        """Return (compilations in this process so far, seconds that they took)."""
        graphs, seconds = compiled_graphs()
        if self.triton is not None:
            graphs, seconds = graphs + self.triton.count, seconds + self.triton.seconds
        return graphs, seconds

    def read(self) -> Reading:
        return Reading(self.device.device_mallocs(), *self.compilations())

    def since(self, before: Reading) -> Since:
        """Return the Sample fields that describe the time since `before`."""
        now = self.read()
        mallocs = None
        if now.device_mallocs is not None and before.device_mallocs is not None:
            mallocs = now.device_mallocs - before.device_mallocs
        return {
            "device_mallocs": mallocs,
            "compiles": now.compiles - before.compiles,
            "compile_s": round(now.compile_s - before.compile_s, 9),  # rounds errors of sums, about 1e-16 s, to 0
            "sm_clock_hz": sm_clock_hz(self.device),
        }


def compiled_graphs() -> tuple[int, float]:
    """Return (graphs that torch.compile made in this process, seconds it took): zeros if it is not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0, 0.0
    graphs = utils.counters.get("stats", {}).get("unique_graphs", 0)
    return graphs, sum(utils.compilation_time_metrics.get("_compile.compile_inner", ()))


def graph_breaks() -> Sequence[Any]:
    """Return torch.compile's records of the graph breaks in this process's program so far.

    Breaks in the code that observes the program are left out.
    """
    found: Sequence[Any] = getattr(sys.modules.get("torch._dynamo.utils"), "graph_break_reasons", ())
    return [each for each in found if not _is_of_observer(each)]


def _is_of_observer(noted: Any) -> bool:
    return bool(noted.user_stack) and Path(noted.user_stack[-1].filename).parent in _OBSERVERS


def graph_break_rows(breaks: Sequence[Any]) -> list[GraphBreakRow]:
    """Return the first MOST_BREAKS distinct breaks, each with its place in the user's code and its count."""
    counts = Counter((_reason(each), _place(each)) for each in breaks)
    return [
        {"reason": reason, "place": place, "count": count} for (reason, place), count in [*counts.items()][:MOST_BREAKS]
    ]


def _reason(noted: Any) -> str:
    """Return the first line of torch's explanation; a branch on a tensor's value has only an internal name."""
    first = plain(str(noted.reason).partition("\n")[0])[:LONGEST_REASON]
    return "branch on the value of a tensor" if first.startswith("generic_jump") else first


def _place(noted: Any) -> str | None:
    """Return file, line and function of the innermost frame; None if torch recorded none."""
    if not noted.user_stack:
        return None
    frame = noted.user_stack[-1]
    # name of the function that continues after a break
    name = frame.name.removeprefix("torch_dynamo_resume_in_").partition("_at_")[0]
    return plain(f"{Path(frame.filename).name}:{frame.lineno} in {name}")


class _TritonCompilations:
    """Counter of Triton's compilations in this process, by Triton's listener; kernels from the disk cache count too."""

    _instance: _TritonCompilations | None = None

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        if importlib.util.find_spec("triton") is not None:
            from triton import knobs

            knobs.compilation.listener = self._listen

    @classmethod
    def shared(cls) -> _TritonCompilations:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def _listen(self, *, times: Any, **_: Any) -> None:
        self.count += 1
        self.seconds += times.total * 1e-6
