"""Readings of the memory of the process and of the device at the ends of steps."""

from __future__ import annotations

import os

from cs_systems.machine.device import Device

MEMORY_EVERY_S = 0.02  # least time between two readings of memory


class Memory:
    """Memory of the process and of the device, by step."""

    def __init__(self, device: Device) -> None:
        self._device, self._page = device, os.sysconf("SC_PAGE_SIZE")
        try:
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None
        self._last_s = 0.0
        self.clear()

    def clear(self) -> None:
        self.host: list[tuple[int, float]] = []
        self.of_device: list[tuple[int, float]] = []

    def after(self, step: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the readings of host memory and of device memory after this step."""
        host, device = ([(n, size) for n, size in of if n > step] for of in (self.host, self.of_device))
        return host, device

    def read(self, now_s: float, step: int) -> None:
        """Read both memories, unless the last reading is very recent."""
        if now_s - self._last_s < MEMORY_EVERY_S:
            return
        self._last_s = now_s
        if self._file is not None:
            self.host.append((step, int(os.pread(self._file, 200, 0).split()[1]) * self._page))
        if self._device.is_cuda:
            self.of_device.append((step, self._device.allocated_bytes()))
