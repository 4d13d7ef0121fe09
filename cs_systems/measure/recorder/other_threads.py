"""Threads of the program's own Python next to the loop's, and the time for which the loop's thread waits meanwhile.

Linux's scheduler counts for each thread how long it ran and how long it waited for a core. The rest of the timed steps
is time in which the loop's thread waited for something else, such as a queue or Python's global lock. In some warm-up
steps, a look at the other threads shows the lines that they are at. If one is in the program's own Python, the looking
thread gives the lock away for a moment, as an operator does, and measures how long it takes to get it back. That counts
only for a thread that ran meanwhile: one that sleeps, or waits for a core, says nothing about the lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import PYTHON_THREADS, PythonThreadRow
from cs_systems.core.collector import without_collector
from cs_systems.measure.recorder.observers import FewSteps, ModelCall, Period
from cs_systems.measure.recorder.stacks import SAMPLER, Line, callee_of, function_of, is_own, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject

PAUSE_S = 1e-3  # time for which the lock is given away
HELD = 0.4  # times the switch interval; a thread that keeps the lock for longer holds up the loop's
RAN = 0.5  # times PAUSE_S; a thread that ran for less did not work during a look
LEAST_SHARE = 0.05  # share of the timed steps; a thread that was busy for less is not kept
PUTS = {"put", "put_nowait"}  # methods of a queue, in the function that a thread runs
SLEEPS = {"time.sleep", "sleep"}  # a line that sleeps is named only if the thread was at no other
_TASKS = Path("/proc/self/task")
_CPU_CLOCK = 6  # lowest bits of the number of a clock of Linux: the CPU time of one thread


class _Spent(NamedTuple):
    """Time for which a thread has run, and for which it waited for a core."""

    ran_s: float
    queued_s: float


def _spent(task: int) -> _Spent | None:
    """Return what the scheduler counted for a thread; None if that is unknown, or it has ended."""
    try:
        ran, queued, *_ = (_TASKS / str(task) / "schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return _Spent(int(ran) * 1e-9, int(queued) * 1e-9)


def _ran_s(task: int) -> float:
    """Return the CPU time of a thread until now; what the scheduler has counted may be milliseconds old."""
    try:
        return time.clock_gettime((~task << 3) | _CPU_CLOCK)
    except OSError:  # it has ended
        return 0.0


class OtherThreads(FewSteps):
    """Observer of other Python threads: the time of all threads in the timed steps, and lines in untimed ones.

    It is idle on a GPU, where the looks would take time of the loop, and among ranks: there the loop also waits for
    kernels, or for the others.
    """

    runs_operators = False

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self._began: tuple[float, dict[int, _Spent]] | None = None
        self._spent: dict[int, _Spent] = {}  # in the timed steps
        self._wall_s = self._waited_s = self._queued_s = self._pool_queued_s = 0.0
        self._measures = False  # whether a look measures how long the lock is kept; a sampled stack makes that short
        self._tried: Counter[int] = Counter()  # such looks while the thread was in the program's own Python
        self._held: Counter[int] = Counter()  # of them, where the lock was kept from the loop
        self._lines: defaultdict[int, Counter[Line]] = defaultdict(Counter)  # of the outermost own function

    def begins(self, period: Period) -> None:
        super().begins(period)
        if self._subject.device.is_cuda or self._subject.world_size > 1:
            self.stop_looking()
            return
        self._measures = period is Period.WARMUP
        if period is Period.TIMED:
            self._began = time.perf_counter(), self._all_spent()

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        if self._began is None:
            return
        begin_s, before = self._began
        after, main = self._all_spent(), threading.get_native_id()
        self._wall_s, self._began = time.perf_counter() - begin_s, None
        self._spent = {
            task: _Spent(*(end - begin for begin, end in zip(before[task], after[task], strict=True)))
            for task in before.keys() & after.keys()
        }
        if (of_loop := self._spent.pop(main, None)) is not None:
            self._waited_s, self._queued_s = max(0.0, self._wall_s - sum(of_loop)), of_loop.queued_s
        in_python = {each.native_id for each in threading.enumerate()}
        in_pools = after.keys() & before.keys() - in_python
        self._pool_queued_s = max((after[task].queued_s - before[task].queued_s for task in in_pools), default=0.0)

    @staticmethod
    def _all_spent() -> dict[int, _Spent]:
        """Return the time of each thread of this process, by the system's number."""
        try:
            tasks = [int(each.name) for each in _TASKS.iterdir()]
        except OSError:
            return {}
        return {task: known for task in tasks if (known := _spent(task)) is not None}

    def _look(self) -> None:
        """Note the lines at which the other threads are, and whether they hold up this one."""
        with without_collector():  # a collection in this call can wait forever for a thread that starts (CPython 3.11)
            frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)  # this call's own, which holds `frames`: a cycle with all its callers
        here = threading.get_native_id()
        working: list[int] = []
        for thread in threading.enumerate():
            task, frame = thread.native_id, frames.get(thread.ident or 0)
            if task is None or frame is None or task == here or thread.name == SAMPLER:
                continue
            chain, leaf = own_lines(frame)
            if leaf is not None and is_own(frame.f_code.co_filename):  # in a wait, the innermost is a library's
                self._lines[task][(chain or (leaf,))[0]] += 1
                working.append(task)
        if working and self._measures:
            before = {task: _ran_s(task) for task in working}
            is_held_up = self._is_held_up(here)
            ran = [task for task in working if _ran_s(task) - before[task] >= RAN * PAUSE_S]
            self._tried.update(ran)
            if is_held_up:
                self._held.update(ran)

    @staticmethod
    def _is_held_up(here: int) -> bool:
        """Return whether this thread waits for Python's lock after it gave it away."""
        before, begin_s = _spent(here), time.perf_counter()
        time.sleep(PAUSE_S)
        lasted_s, after = time.perf_counter() - begin_s, _spent(here)
        if before is None or after is None:
            return False
        return lasted_s - PAUSE_S - (after.queued_s - before.queued_s) > HELD * sys.getswitchinterval()

    def look_at_call(self, call: ModelCall) -> None:
        self._look()

    def look_at_result(self, result: Any, is_in_update: bool) -> None:
        self._look()

    def look_before_backward(self, roots: Any) -> None:
        self._look()

    def look_after_backward(self) -> None:
        self._look()

    def look_before_update(self, optimizer: Optimizer) -> None:
        self._look()

    def look_after_update(self, optimizer: Optimizer) -> None:
        self._look()

    def end(self) -> None:
        rows: list[PythonThreadRow] = []
        for task, lines in self._lines.items():
            spent = self._spent.get(task, _Spent(0.0, 0.0))
            busy_s = sum(spent)  # it may keep the lock while it waits for a core
            if not self._wall_s or busy_s < LEAST_SHARE * self._wall_s:
                continue
            line = max(lines, key=lambda each: (callee_of(each) not in SLEEPS, lines[each]))
            rows.append(
                {
                    "function": function_of(line),
                    "place": place_of(line),
                    "calls": callee_of(line),
                    "puts": not PUTS.isdisjoint(line[0].co_names),
                    "busy_share": busy_s / self._wall_s,
                    "ran_share": spent.ran_s / self._wall_s,
                    "waited_share": self._waited_s / self._wall_s,
                    "queued_share": self._queued_s / self._wall_s,
                    "pool_queued_share": self._pool_queued_s / self._wall_s,
                    "operator_threads": torch.get_num_threads(),
                    "tries": self._tried[task],
                    "held_share": self._held[task] / max(1, self._tried[task]),
                }
            )
        self.keep(PYTHON_THREADS, sorted(rows, key=lambda row: -row["busy_share"]))
