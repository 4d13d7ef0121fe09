"""Progress of a sweep: a line as each cell is done, with its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from cs_systems.config import describe
from cs_systems.core.printable import plain
from cs_systems.core.units import human
from cs_systems.record import NO_TIMING, RunRecord
from cs_systems.report import collectives
from cs_systems.report.tables.layout import is_timed

if TYPE_CHECKING:
    from cs_systems.runtime.sweep import Progress


def outcome(record: RunRecord) -> str:
    """Describe the outcome of a cell in one line."""
    if record.measurement is None:
        return f"{record.status}: {record.reason}"
    if not record.is_timing:
        return "; ".join(f"{w.message}, not timed [{w.code}]" for w in record.warnings if w.code in NO_TIMING)
    if not is_timed(record.config["workload"], record.run_config.profiler):
        return "done"
    marks = "".join(f" [{w.code}]" for w in record.warnings)
    if call_s := collectives.call_s(record):
        return f"{human(call_s, 's')} per call{marks}"
    return f"{human(median(record.measurement.durations_s('step')), 's')} per step{marks}"


def progress_lines(progress: Progress, before: int = 0, total: int | None = None) -> Iterator[str]:
    """Yield lines for a log, each with its newline.

    before: cells of earlier sweeps of the same command. total: cells of all its sweeps.
    """
    if progress.note:
        yield f"{plain(progress.note)}\n"
    if progress.record:
        place = f"[{before + progress.done}/{total or progress.total}]"
        yield plain(f"{place} {describe(progress.record.run_config)}: {outcome(progress.record)}") + "\n"
