"""Sweeps on the command line: progress while measuring, then a table and the paths of the results."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cs_systems.analysis.comparison.own_code import OWN_CODE, compared
from cs_systems.cli._document import add, is_wanted
from cs_systems.cli._options import Sweep, refuse
from cs_systems.cli._output import Interrupted, print_table, terminal_width
from cs_systems.cli._progress import announced, clock, current, duration, named, outcome, progress_lines
from cs_systems.config import Phase, RunConfig, describe, same_fields
from cs_systems.core.experiments import EXPERIMENTS
from cs_systems.core.plugins import is_foreign
from cs_systems.core.printable import command_line, labelled_command, plain, visible
from cs_systems.core.tables import Column, Table
from cs_systems.measure.runtime.sweep import Progress, check, preflight, sweep
from cs_systems.record import RunRecord, records_path
from cs_systems.report.reading import sound_records
from cs_systems.report.tables.formats import text_width

if TYPE_CHECKING:
    from rich.console import Console

    from cs_systems.analysis.diagnosis import Answer

EXIT_NOTHING = 3
REDRAW_S = 0.5  # shortest time between two redraws of the progress bar
HEARTBEAT_S = 4.0  # time between two redraws while the first process starts


class CellRow(TypedDict):
    """Cell before it runs; `note` gives the reason if it cannot run or does not fit."""

    cell: str
    predicted_peak_bytes: Annotated[int | None, Column(own_unit=True)]
    note: str


CELLS = Table("to_measure", CellRow, "cells to measure")


def run_and_report(
    configs: Sequence[RunConfig],
    options: Sweep,
    command: str,
    seed: int,
    show: Callable[[RunRecord, Path], None] | None = None,
    experiments_s: float = 0.0,
    tables: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> int:
    """Measure the cells (or list them, with --dry-run), print the table, and return the exit status.

    show: prints details of each record, given the folder that holds it, before the table.
    experiments_s: the time for experiments of all cells together. tables: the tables of a document, with --format json.
    columns: of the printed table, next to the usual ones.
    """
    from cs_systems.analysis.comparison.verdict import verdict
    from cs_systems.report.tables.records import render

    _check_columns(columns, configs)
    if options.dry_run:
        return print_cells(configs, options)
    folder, records = measured(configs, options, command, seed, experiments_s)
    status = exit_status(asked_for(records, options.of_share(configs)))
    if is_wanted():
        print_document(records, folder, tables)
        if show:
            for record in records:
                show(record, folder)
        return status
    answer = print_diagnoses(records)
    print_left_out(records)
    if show:
        for record in records:
            show(record, folder)
    width = terminal_width()
    print(render(records, width=width, color=width is not None, added=columns))
    print_own_code(records)
    if text := verdict(records):
        print(f"{textwrap.fill(text, text_width(width), break_on_hyphens=False)}\n")
    print(visible(f"records: {records_path(folder)}"))
    if any(record.status == "error" for record in records) and (folder / "worker.log").exists():
        print(visible(f"errors:  {folder / 'worker.log'}"))
    words = ("cs-systems", "report", folder, "--format", "html", "--open")
    print(labelled_command("report:", words, text_width(width)))
    print_try(answer, records)
    return status


def _check_columns(names: Sequence[str], configs: Sequence[RunConfig]) -> None:
    """Raise ConfigError for an unknown column, before anything is measured.

    The phases of the user's own step are known only afterwards.
    """
    from cs_systems.report.frame import STEP
    from cs_systems.report.tables import columns

    if names and is_wanted():
        refuse(["columns"], "--format json has every column")
    any_phase = any(is_foreign(config.workload) for config in configs)
    for name in names:
        try:
            columns.parse(name, () if any_phase and "." in name else (STEP, *Phase))
        except columns.UnknownColumn as error:
            raise columns.UnknownColumn(error.name, "cs-systems report DIR --format csv | head -1") from None


def print_document(records: Sequence[RunRecord], folder: Path, tables: Sequence[str] = ()) -> None:
    """Add the records, with these tables of their results, to the document of the command."""
    from cs_systems.analysis.comparison.verdict import verdict
    from cs_systems.report.tables import records_document

    add(records_document.measured(records, [*tables, OWN_CODE.name, EXPERIMENTS.name]))
    if text := verdict(records):
        print(text)
    print(visible(f"records: {records_path(folder)}"))
    print(visible(f"every row: {command_line('cs-systems', 'report', folder, '--format', 'json', '--table', 'NAME')}"))


def print_diagnoses(records: Sequence[RunRecord]) -> Answer:
    """Print the first sentences of the output, about the largest losses of time in the cells, and return the answer."""
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.report import diagnoses

    answer = diagnose(records)
    print(diagnoses.text(answer, width=terminal_width()), end="")
    return answer


def print_try(answer: Answer, records: Sequence[RunRecord]) -> None:
    """Print the command that would try the first remedy, if the records are of one cell."""
    from cs_systems.advise.answer import command_words
    from cs_systems.cli._advice import try_command

    cells = {record.run_config.of_any_measurement for record in records}
    if answer.diagnoses and len(cells) == 1 and not (cell := next(iter(cells))).is_distributed:
        words = try_command(answer, command_words(cell)[2:])
        if words:
            print(labelled_command("advise:", words, text_width(terminal_width())))


def print_left_out(records: Sequence[RunRecord]) -> None:
    """Print the experiments that were not made, with the reasons."""
    rows = [row for record in records for row in EXPERIMENTS.of(record.results) if row["skipped"]]
    for text in dict.fromkeys(f"no experiment {row['experiment']}: {row['skipped']}" for row in rows):
        print(visible(text))


def print_own_code(records: Sequence[RunRecord]) -> None:
    """Print each of the user's own functions next to the built-in one that it replaces, if there are any."""
    if rows := compared(records):
        print_table(OWN_CODE, rows)


def print_figure_and_paths(
    format: str, folder: Path, kind: str, figure: Path | None, drawn: Sequence[RunRecord]
) -> None:
    """Draw the figure of the records `drawn`, if they have the data, and print its path and the path of the records.

    The paths go to standard error unless the tables are for the terminal, because another program may read the tables.

    figure: file of the figure; None for a file in the folder, named after the kind.
    """
    from cs_systems.report.figures import plot

    stream = sys.stdout if format == "terminal" else sys.stderr
    if kind in plot.kinds(drawn):
        file = figure or folder / f"{'figure' if kind == 'collectives' else kind}.svg"
        plot.save(drawn, file, kind)
        which = " (one step of rank 0; the tables are over all steps)" if kind == "streams" else ""
        print(visible(f"figure:  {file}{which}"), file=stream)
    elif figure:
        print(visible(f"{figure} was not drawn: no record has the data for this figure"), file=sys.stderr)
    print(visible(f"records: {records_path(folder)}"), file=stream)


def asked_for(records: Sequence[RunRecord], cells: Sequence[RunConfig]) -> list[RunRecord]:
    """Return the last record of each repeat of these cells, from all records of a folder.

    These are the results of this command, measured now or before it was interrupted.
    """
    mine = set(cells)
    return [*{(config, r.repeat): r for r in records if (config := r.run_config) in mine}.values()]


def exit_status(records: Sequence[RunRecord]) -> int:
    return 0 if any(r.status in ("ok", "oom") for r in records) else EXIT_NOTHING


def measured(
    configs: Sequence[RunConfig], options: Sweep, command: str, seed: int, experiments_s: float = 0.0
) -> tuple[Path, list[RunRecord]]:
    """Measure the cells, showing progress; return the folder of the records, and all records in it."""
    cells = options.of_share(check(configs, options.repeats, options.timeout_s))
    folder = options.claim(command)
    try:
        with _progress(cells) as shown:
            for _ in sweep(
                cells,
                out=folder,
                repeats=options.repeats,
                timeout_s=options.timeout_s,
                fresh=options.fresh,
                skip_oom=options.skip_oom,
                interleave=options.interleave,
                record_host=options.record_host,
                shuffle_seed=seed if options.shuffle else None,
                experiments_s=experiments_s,
                on_progress=shown.update,
            ):
                pass
    except KeyboardInterrupt:
        if not records_path(folder).exists():
            raise
        raise Interrupted(folder) from None
    finally:
        if options.out is None:
            with suppress(OSError):
                folder.rmdir()  # fails if the folder is not empty
    return folder, sound_records(folder)[0]


def print_cells(configs: Sequence[RunConfig], options: Sweep | None = None) -> int:
    """Print this job's cells of a sweep, with predicted and available device memory, and why some cannot run."""
    from cs_systems.core.units import counted, human

    options = options or Sweep()
    configs = options.of_share(check(configs, options.repeats, options.timeout_s))
    cells: list[CellRow] = []
    for config, row in zip(configs, preflight(configs, timeout_s=options.timeout_s), strict=True):
        predicted, memory = row["predicted_peak_bytes"], row["device_memory_bytes"]
        note = row["reason"] or ""
        if predicted is not None and memory is not None and predicted > memory:
            note = f"does not fit the device's {human(memory, 'bytes')}"
        cells.append({"cell": describe(config), "predicted_peak_bytes": predicted, "note": note})
    times = f", each {options.repeats} times" if options.repeats > 1 else ""
    print_table(CELLS, cells, [counted(len(configs), "cell") + times])
    return 0


def print_warmup(record: RunRecord, _folder: Path) -> None:
    """Print every step of a cell, warm-up included, with the causes of slow steps."""
    from cs_systems.analysis.comparison.warmup import warmup_curve

    if record.measurement is None:
        return
    curve = warmup_curve(record.measurement)
    rows = [{**row, "excess_s": row["excess_s"] if row["cause"] else None} for row in curve]
    print_table(replace(warmup_curve, caption=f"{describe(record.run_config)}: {warmup_curve.caption}"), rows)


def _console(stderr: bool = False) -> Console:
    """Return a console without markup: rich would take `[flash-attn]` for a style and `:factory:` for an emoji."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _progress(cells: Sequence[RunConfig]) -> _Lines | _Bar:
    return _Bar(same_fields(cells) if len(cells) > 1 else ()) if sys.stderr.isatty() else _Lines()


class _Lines(AbstractContextManager["_Lines"]):
    """Progress as lines for logs and pipes: one line per cell, with the elapsed time."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def update(self, progress: Progress) -> None:
        if progress.note or progress.record or progress.experiments:
            sys.stderr.writelines(progress_lines(progress, elapsed=duration(time.monotonic() - self._began_s)))
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        return


class _Bar(AbstractContextManager["_Bar"]):
    """Progress bar with the elapsed time, at most twice a second: before, within and after a cell.

    From the first update on, only updates redraw it: a refreshing thread would disturb measurements. A cell is named by
    what differs from the others, so that its line fits; `same` are the fields that all cells share.
    """

    def __init__(self, same: Collection[str] = (), now: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=_console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._same, self._now, self._began_s, self._drawn = same, now, now(), -REDRAW_S
        self._is_started, self._starting = threading.Event(), threading.Thread()

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        self._bar.refresh()
        self._starting = threading.Thread(target=self._beat, daemon=True)
        self._starting.start()
        return self

    def _beat(self) -> None:
        """Let the elapsed time move until the first update, before which nothing is measured."""
        while not self._is_started.wait(HEARTBEAT_S):
            self._bar.update(self._task, description=f"{clock(self._now() - self._began_s)} · starting", refresh=True)

    def _started(self) -> None:
        """End the heartbeat."""
        self._is_started.set()
        if self._starting.is_alive():
            self._starting.join()

    def update(self, progress: Progress) -> None:
        self._started()
        if progress.note:
            self._bar.console.print(plain(progress.note))
        if progress.experiments:
            self._bar.console.print(announced(*progress.experiments))
        if progress.record:
            cell = named(progress.record.run_config, self._same)
            self._bar.console.print(plain(f"{cell}: {outcome(progress.record)}"))
        text = " · ".join(filter(None, [clock(self._now() - self._began_s), current(progress, self._same)]))
        due = bool(progress.record or progress.note or progress.experiments) or self._now() - self._drawn >= REDRAW_S
        if due:
            self._drawn = self._now()
        self._bar.update(self._task, completed=progress.done, total=progress.total, description=text, refresh=due)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self._started()
        self._bar.__exit__(kind, value, trace)
