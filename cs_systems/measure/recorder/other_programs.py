"""Readings of the work of other programs on this machine, which make a loop's steps longer."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

EVERY_S, EVERY_READS = 0.05, 200.0  # least time between two readings: in seconds, and in times of a reading's own
IDLE = (3, 4)  # positions of the times without work in the first line of /proc/stat: idle, and waiting for a disk
KNOWN = 8  # fields up to the time that a hypervisor took; later ones count some of these again


class Reading(NamedTuple):
    """Times since the system's start, over all cores: of all other programs, and of all that could be used."""

    step: int
    others_s: float
    all_s: float


def times_in(stat: str, tick_s: float) -> tuple[float, float]:
    """Return (busy, all) seconds over all cores, from the text of /proc/stat."""
    fields = [int(word) * tick_s for word in stat.split("\n", 1)[0].split()[1 : KNOWN + 1]]
    return sum(fields) - sum(fields[at] for at in IDLE), sum(fields)


class OtherPrograms:
    """Share of the machine's cores that other programs use, by step; unknown without /proc/stat."""

    def __init__(self, path: str = "/proc/stat") -> None:
        self._next_s, self._tick_s = 0.0, 1 / os.sysconf("SC_CLK_TCK")
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None
        self.clear()

    def clear(self) -> None:
        self.readings: list[Reading] = []

    def read(self, now_s: float, own_s: float, step: int) -> None:
        """Read the times at the end of a step, unless the last reading is very recent.

        own_s: CPU time of this process.
        """
        if self._file is None or now_s < self._next_s:
            return
        begin_s = time.perf_counter()
        busy_s, all_s = times_in(os.pread(self._file, 1000, 0).decode("ascii", "replace"), self._tick_s)
        self._next_s = now_s + max(EVERY_S, EVERY_READS * (time.perf_counter() - begin_s))
        self.readings.append(Reading(step, busy_s - own_s, all_s))

    def close(self) -> None:
        """End the readings."""
        if self._file is not None:
            with suppress(OSError):  # the program may have closed all its descriptors
                os.close(self._file)
            self._file = None

    def rise(self, step: int) -> float:
        """Return the rise of their share of the cores from the first to the last third of the readings after a step."""
        known = [reading for reading in self.readings if reading.step > step]
        third = len(known) // 3
        if not third:
            return 0.0
        return _share(known[-third - 1], known[-1]) - _share(known[0], known[third])

    def share_before(self, step: int) -> float:
        """Return their share of the cores in the steps before this one; 0 if unknown."""
        before = [reading for reading in self.readings if reading.step < step]
        return _share(before[0], before[-1]) if before else 0.0

    def fall_after(self, step: int) -> float:
        """Return the fall of their share of the cores, from the steps before this one to the others."""
        before = [reading for reading in self.readings if reading.step < step]
        after = [reading for reading in self.readings if reading.step >= step]
        if len(before) < 2 or not after:
            return 0.0
        return self.share_before(step) - _share(before[-1], after[-1])


def _share(first: Reading, last: Reading) -> float:
    """Return the share of the cores that other programs had between two readings."""
    return (last.others_s - first.others_s) / (last.all_s - first.all_s) if last.all_s > first.all_s else 0.0
