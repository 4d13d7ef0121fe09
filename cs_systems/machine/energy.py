"""Energy of a device between two moments, from its energy counter; None if there is none that can be read.

On NVIDIA GPUs since Volta, NVML counts the millijoules of the board since the driver was loaded. On a CPU, RAPL counts
the microjoules of each package in /sys/class/powercap; most systems let only root read it. NVML updates it every
20 to 100 ms, so a window is off by up to that at both ends: it is read once around all timed steps, never around one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cs_systems.formulas.energy import EnergyRow
from cs_systems.machine.device import Device
from cs_systems.machine.environment import energy_j, idle_power_w

SHORTEST_S = {"nvml": 1.0, "rapl": 0.05}
"""Shortest window in s with a result, so that the counter's delay at both ends is at most a tenth of it."""

POWERCAP = Path("/sys/class/powercap")


class Meter:
    """Energy counter of one device; a window begins with `begin` and ends with `end`.

    alone: whether no other process of the same job computes on the device, or on any CPU if it is the CPU.
    """

    def __init__(
        self,
        device: Device,
        *,
        alone: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        powercap: Path = POWERCAP,
    ) -> None:
        self._device, self._clock = device, clock
        self._source = "nvml" if device.is_cuda else "rapl"
        self._packages = _packages(powercap) if not device.is_cuda and alone else []
        self._idle_w = idle_power_w(device)
        self._begun: tuple[float, list[float]] | None = None

    def begin(self) -> None:
        """Begin a window; the device has finished all earlier work."""
        counters = self._read()
        self._begun = (self._clock(), counters) if counters else None

    def end(self, steps: int) -> list[EnergyRow]:
        """Return the row of the window since `begin`, in which `steps` steps ran; empty without a counter."""
        if self._begun is None:
            return []
        (began_s, before), after = self._begun, self._read()
        window_s, self._begun = self._clock() - began_s, None
        if len(after) != len(before):
            return []
        used = sum(self._since(index, a, b) for index, (a, b) in enumerate(zip(before, after, strict=True)))
        return [
            {
                "source": self._source,
                "steps": steps,
                "window_s": window_s,
                "energy_j": used if window_s >= SHORTEST_S[self._source] else None,
                "idle_w": self._idle_w,
            }
        ]

    def _read(self) -> list[float]:
        """Return the joules of each counter; empty if one cannot be read."""
        if self._device.is_cuda:
            joules = energy_j(self._device)
            return [] if joules is None else [joules]
        try:
            return [int((package / "energy_uj").read_text()) * 1e-6 for package in self._packages]
        except (OSError, ValueError):
            return []

    def _since(self, index: int, before: float, after: float) -> float:
        """Return the joules between two readings of a counter, which wraps around at the end of its range."""
        if after >= before or self._device.is_cuda:
            return after - before
        return after - before + int((self._packages[index] / "max_energy_range_uj").read_text()) * 1e-6


def _packages(powercap: Path) -> list[Path]:
    """Return the folders of the CPU packages' counters, which include the cores; empty if none can be read."""
    found = []
    with suppress(OSError):
        for folder in sorted(powercap.glob("intel-rapl:*")):
            if (folder / "name").read_text().startswith("package"):
                (folder / "energy_uj").read_text()
                found.append(folder)
        return found
    return []
