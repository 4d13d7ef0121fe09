"""Progress of a sweep: a line after each cell, and the cell that is running."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cs_systems.config import RunConfig, describe
from cs_systems.core.printable import plain
from cs_systems.core.units import human
from cs_systems.measure.runtime.sweep import Progress
from cs_systems.record import NO_TIMING, RunRecord
from cs_systems.report import collectives
from cs_systems.report.tables.layout import is_timed


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


def clock(seconds: float) -> str:
    """Format an elapsed time in whole seconds, so that it moves also after an hour: 12 s, 4:05, 1:04:05."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def named(config: RunConfig, same: Collection[str] = ()) -> str:
    """Return the description of a cell without the fields `same`, which all cells of the sweep share."""
    return plain(describe(config, same) or describe(config))


def current(progress: Progress, same: Collection[str] = ()) -> str:
    """Return the cell that is measured now, with its round or its step; empty between cells.

    same: fields that all cells share, which are left out.
    """
    if progress.config is None:
        return ""
    rounds = progress.config.rounds
    place = f", round {progress.round + 1}/{rounds}" if progress.round is not None and rounds > 1 else ""
    if progress.warmup:
        done, steps = progress.warmup
        seconds = progress.config.steps_s
        then = duration(seconds) if seconds else progress.config.steps
        place = f", warm-up step {done}/{steps}, then {then} timed"
    if progress.timed:
        place += f", timed step {progress.timed[0] + 1}/{progress.timed[1]}"
    return named(progress.config, same) + place


def announced(count: int, cost_s: float) -> str:
    """Return the line before experiments: their number, and about how long they take."""
    return f"experiments: {count}, about {human(cost_s, 's')} (--no-experiments leaves them out)"


def progress_lines(progress: Progress, before: int = 0, total: int | None = None, elapsed: str = "") -> Iterator[str]:
    """Yield lines for a log, each with its newline.

    before: cells of earlier sweeps of the same command. total: cells of all its sweeps. elapsed: the time of all its
    sweeps so far.
    """
    if progress.note:
        yield f"{plain(progress.note)}\n"
    if progress.experiments:
        yield f"{announced(*progress.experiments)}\n"
    if progress.record:
        place = f"[{before + progress.done}/{total or progress.total}]"
        times = f" ({elapsed})" if elapsed else ""
        yield plain(f"{place} {describe(progress.record.run_config)}: {outcome(progress.record)}{times}") + "\n"
