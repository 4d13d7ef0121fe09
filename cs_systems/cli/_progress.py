"""Progress of a sweep: a line as each cell is done, the cell that runs, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cs_systems.config import RunConfig, describe
from cs_systems.core.printable import plain
from cs_systems.core.units import human
from cs_systems.record import NO_TIMING, RunRecord
from cs_systems.report import collectives
from cs_systems.report.tables.layout import is_timed

if TYPE_CHECKING:
    from cs_systems.measure.runtime.sweep import Progress


def outcome(record: RunRecord) -> str:
    """Describe the outcome of a cell in one line."""
    if record.measurement is None:
        return f"{record.status}: {record.reason}"
    if not record.is_timing:
        return "; ".join(f"{w.message} [{w.code}]" for w in record.warnings if w.code in NO_TIMING)
    if not is_timed(record.config["workload"], record.run_config.profiler):
        return "done"
    marks = "".join(f" [{w.code}]" for w in record.warnings)
    if call_s := collectives.call_s(record):
        return f"{human(call_s, 's')} per call{marks}"
    step_s = record.measurement.median_s()
    return f"{'unknown' if step_s is None else human(step_s, 's')} per step{marks}"


def duration(seconds: float) -> str:
    """Format a duration for people: 12 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class Pace:
    """Time that a sweep has taken, and an estimate of the time that is left.

    The estimate weighs the cells by their estimated durations, which the first records of the sweep calibrate.

    Args:
        cells: the cells of the sweep; of its repeats, each once.
        clock: the clock, in s.
    """

    def __init__(self, cells: Sequence[RunConfig] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._cells, self._clock, self._began = cells, clock, clock()
        self._records: list[RunRecord] = []

    def text(self, progress: Progress) -> str:
        """Return the elapsed time and, from the first record on, the time left; call it for every update."""
        if progress.record:
            self._records.append(progress.record)
        elapsed_s = self._clock() - self._began
        left = progress.total - progress.done
        if not self._records or not left:
            return duration(elapsed_s)
        return f"{duration(elapsed_s)}, {duration(elapsed_s * left / len(self._records) * self._weight())} left"

    def _weight(self) -> float:
        """Return how long a cell that is left takes on average, relative to one that is done."""
        from cs_systems.analysis.comparison.durations import Machine, estimate

        environment = self._records[-1].environment
        done = [record.run_config for record in self._records]
        left = [cell for cell in self._cells if cell not in done]
        if environment is None or not left:
            return 1.0
        machine = Machine(environment.device_name, environment.device != "cpu", environment.cpu_threads)
        before = estimate(done, self._records, machine)
        after = estimate(left, self._records, machine, started=done)
        if after.unknown or before.unknown:
            return 1.0
        return (after.cells_s / len(left)) / (before.cells_s / len(done))


def current(progress: Progress) -> str:
    """Return the cell that is measured now, with its round or its warm-up step; empty between cells."""
    if progress.config is None:
        return ""
    rounds = progress.config.rounds
    place = f", round {progress.round + 1}/{rounds}" if progress.round is not None and rounds > 1 else ""
    if progress.warmup:
        done, steps = progress.warmup
        place = f", warm-up step {done}/{steps}, then {progress.config.steps} timed"
    return plain(describe(progress.config)) + place


def progress_lines(progress: Progress, before: int = 0, total: int | None = None, pace: str = "") -> Iterator[str]:
    """Yield lines for a log, each with its newline.

    before: cells of earlier sweeps of the same command. total: cells of all its sweeps. pace: elapsed time and time
    left.
    """
    if progress.note:
        yield f"{plain(progress.note)}\n"
    if progress.record:
        place = f"[{before + progress.done}/{total or progress.total}]"
        times = f" ({pace})" if pace else ""
        yield plain(f"{place} {describe(progress.record.run_config)}: {outcome(progress.record)}{times}") + "\n"
