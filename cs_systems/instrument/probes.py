"""Counters read before and after a step, outside its timing: possible reasons why it was slow."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Any, TypedDict

from cs_systems.machine.device import Device
from cs_systems.machine.environment import sm_clock_hz


@dataclass(frozen=True)
class Reading:
    device_mallocs: int | None
    compiles: int
    compile_s: float


class Since(TypedDict):
    """Fields of a `Sample` that counters give."""

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
        graphs, seconds = _dynamo()
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
            "compile_s": round(now.compile_s - before.compile_s, 9),  # rounds the 1e-16 s that sums leave to 0
            "sm_clock_hz": sm_clock_hz(self.device),
        }


def _dynamo() -> tuple[int, float]:
    """Return (graphs that torch.compile made in this process, seconds it took): zeros if it is not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0, 0.0
    graphs = utils.counters["stats"].get("unique_graphs", 0)
    return graphs, sum(utils.compilation_time_metrics.get("_compile.compile_inner", ()))


class _TritonCompilations:
    """Count of Triton's compilations in this process, by its listener (a kernel from the disk cache counts too)."""

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
