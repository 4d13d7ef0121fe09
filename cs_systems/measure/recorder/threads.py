"""Threads of torch's operators: their number, if it exceeds the cores', and what an operator costs then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from cs_systems.analysis.comparison.loop_findings import THREADS
from cs_systems.machine.cores import usable_cores
from cs_systems.measure.recorder.observers import Observer

ELEMENTS = 1 << 19  # enough for sixteen threads
CALLS, ROUNDS = 10, 5


class Threads(Observer):
    """Observer of the number of threads; where it exceeds the cores, one operator is timed with each number."""

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        threads, cores = torch.get_num_threads(), usable_cores()
        if threads <= cores:
            return
        lasted_s = _operator_s()
        try:
            torch.set_num_threads(cores)
            of_cores_s = _operator_s()
        finally:
            torch.set_num_threads(threads)
        self.keep(THREADS, [{"threads": threads, "cores": cores, "time_s": lasted_s, "of_cores_s": of_cores_s}])


def _operator_s() -> float:
    """Return the time of an elementwise operator: the median of a few rounds."""
    one = torch.ones(ELEMENTS)
    times_s = []
    for _ in range(ROUNDS + 1):  # the first starts the threads
        begin_s = time.perf_counter()
        for _ in range(CALLS):
            torch.add(one, one)
        times_s.append((time.perf_counter() - begin_s) / CALLS)
    return median(times_s[1:])
