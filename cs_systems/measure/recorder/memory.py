"""Readings of the memory of the process and of the device at the ends of steps."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median

from cs_systems.machine.device import Device

IN_USE = 1 / 3  # least share of the growth that the memory in use must show, by the medians of its outer thirds
FEWEST_IN_USE = 2  # readings of the memory in use that can differ
MEMORY_EVERY_S = 0.02  # least time between two readings of memory
REST = 20.0  # times as long as a reading of the memory in use lasted until the next: glibc walks over all free pieces


BLOCK_BYTES = 64  # of a small Python object, about


class _MallInfo(ctypes.Structure):
    """Numbers of glibc's allocator (mallinfo2), all in bytes or counts."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def reader_of_held() -> Callable[[], int] | None:
    """Return a function that reads the memory in use, without what an allocator keeps; None where that is unknown."""
    with suppress(OSError, AttributeError):
        read = ctypes.CDLL(None).mallinfo2
        read.restype = _MallInfo

        def held() -> int:
            now = read()
            return int(now.uordblks + now.hblkhd) + BLOCK_BYTES * sys.getallocatedblocks()

        return held if read().uordblks else None
    return None


class Memory:
    """Memory of the process and of the device, by step."""

    def __init__(self, device: Device) -> None:
        self._device, self._page = device, os.sysconf("SC_PAGE_SIZE")
        try:
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None
        self._last_s, self._next_held_s, self.held_bytes = 0.0, 0.0, reader_of_held()
        self.clear()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the program may have closed all its descriptors
                os.close(file)

    def clear(self) -> None:
        self.host: list[tuple[int, float]] = []
        self.of_device: list[tuple[int, float]] = []
        self.held: list[tuple[int, float]] = []

    def after(self, step: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the readings of host memory and of device memory after this step."""
        host, device = ([(n, size) for n, size in of if n > step] for of in (self.host, self.of_device))
        return host, device

    def grows_in_use(self, step: int, by_bytes: float) -> bool:
        """Return whether the memory in use grew after this step by at least a third of `by_bytes`.

        If it did not, an allocator keeps memory in pieces that fit no later request, as happens where sizes change.
        True where it cannot be read; False if a slow reading has left too few of them.
        """
        sizes = [size for n, size in self.held if n > step]
        if self.held_bytes is None or len(sizes) < FEWEST_IN_USE:
            return self.held_bytes is None
        third = max(1, len(sizes) // 3)
        return median(sizes[-third:]) - median(sizes[:third]) >= IN_USE * by_bytes

    def read(self, now_s: float, step: int) -> bool:
        """Read both memories, unless the last reading is very recent; return whether they were read."""
        if now_s - self._last_s < MEMORY_EVERY_S:
            return False
        self._last_s = now_s
        if self._file is not None:
            self.host.append((step, int(os.pread(self._file, 200, 0).split()[1]) * self._page))
            if self.held_bytes is not None and now_s >= self._next_held_s:
                begin_s = time.perf_counter()
                self.held.append((step, self.held_bytes()))
                self._next_held_s = now_s + REST * (time.perf_counter() - begin_s)
        if self._device.is_cuda:
            self.of_device.append((step, self._device.allocated_bytes()))
        return True
