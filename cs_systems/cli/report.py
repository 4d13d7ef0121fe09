"""Show the records of a run as a table, a figure, or one HTML page that needs no network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from cs_systems.cli._options import MaybePath, MaybeText, Names, given, optional, refuse
from cs_systems.cli._output import MaybeFormat, Open, check_outputs, deliver, figure_file, page_asked, terminal_width
from cs_systems.config import ConfigError
from cs_systems.core.printable import command_line, labelled_command, visible
from cs_systems.record import RunRecord
from cs_systems.report.figures.kinds import KINDS

if TYPE_CHECKING:
    from cs_systems.core.tables import Table
    from cs_systems.report.advice import Advice, ProcessRow


WATERFALL = "waterfall"  # kind of figure of a search by advise, drawn from its answer and not from records


@dataclass(frozen=True)
class Report:
    dir: Annotated[Positional[Path], arg(metavar="DIR", help="folder of a run, or its records.jsonl")]
    format: Annotated[
        MaybeFormat, arg(help="output format", help_behavior_hint="(default: terminal; with --figure none)")
    ] = None
    columns: Annotated[
        Names,
        arg(
            help="columns to show, such as size median_ms backward.median_ms range_s mfu note",
            help_behavior_hint="(default: the columns that differ)",
        ),
    ] = ()
    pivot: Annotated[
        MaybeText, optional("ROWS:COLUMNS:VALUE", "cross table, such as size,context_length:attention:median_ms")
    ] = None
    phase: Annotated[
        Names, arg(help="phases to show, one row each: step, forward, …", help_behavior_hint="(default: step)")
    ] = ()
    where: Annotated[
        MaybeText,
        optional("CONDITION", "cells to keep, by DataFrame.query: 'size == \"xl\" and median_ms < 10'", "all"),
    ] = None
    sort: Annotated[MaybeText, optional("NAME", "column to sort by; NAME:desc: the largest first")] = None
    relative_to: Annotated[
        MaybeText, optional("FIELD=VALUE", "add each cell's speed-up over this one's: attention=naive")
    ] = None
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None
    figure: Annotated[MaybePath, optional("FILE", "file for a figure: .svg, .png or .pdf")] = None
    figure_kind: Annotated[MaybeText, optional("KIND", ", ".join([*KINDS, WATERFALL]), "by what varies")] = None
    paper: Annotated[
        MaybePath, optional("FOLDER", "write all tables (.tex, .typ) and figures (.pdf) of the run for a paper")
    ] = None
    table: Annotated[
        Names,
        arg(
            help="tables of --format json: cells with every column, or results of the records, such as kernels",
            help_behavior_hint="(default: a short answer, which names them)",
        ),
    ] = ()
    open: Open = False


ARGS = Report


def run(args: Report) -> int:
    """Show the records; return exit status 0.

    Raises ConfigError for a malformed request or record, and FileNotFoundError if there are no records.
    """
    from cs_systems.report.tables.columns import UnknownColumn

    try:
        return _show(args)
    except UnknownColumn as error:
        every_column = f"{command_line('cs-systems', 'report', args.dir, '--format', 'csv')} | head -1"
        raise UnknownColumn(error.name, every_column) from None


def _show(args: Report) -> int:
    from cs_systems.report.advice import read

    args = page_asked(args)
    arranged = args.sort is not None or args.relative_to is not None
    if args.format == "html" and (args.columns or args.pivot is not None or args.phase):
        raise ConfigError("--format html shows every column and phase; leave out --columns, --pivot and --phase")
    if args.format == "html" and arranged:
        raise ConfigError("--format html has no speed-ups and sorts in the browser; leave out --sort and --relative-to")
    if args.table and args.format != "json":
        raise ConfigError("--table requires --format json; add it, or choose columns with --columns")
    if args.format == "json" and args.pivot is not None:
        raise ConfigError("--format json has a row for each cell; leave out --pivot")
    if args.table and (args.columns or args.phase or arranged):
        raise ConfigError("--table shows every column; leave out --columns, --phase, --sort and --relative-to")
    if args.pivot is not None and arranged:
        raise ConfigError("--sort and --relative-to have no effect on --pivot; leave them out")
    if args.columns and args.pivot is not None:
        raise ConfigError("--pivot ROWS:COLUMNS:VALUE already chooses the columns; leave out --columns or --pivot")
    if args.figure_kind is not None and args.figure is None:
        raise ConfigError("--figure-kind requires --figure; add --figure FILE or leave out --figure-kind")
    if args.paper is not None and (unfit := {*given(args, Report(args.dir))} - {"paper", "where"}):
        refuse(sorted(unfit), "--paper writes every table and figure")
    check_outputs({"--output": args.output, "--figure": figure_file(args.figure)}, [args.dir])
    advice = read(args.dir)
    records, complaints = _records(args.dir, advice)
    for complaint in complaints:
        print(visible(complaint), file=sys.stderr)
    if args.where is not None:
        from cs_systems.report.tables.selection import select

        records = select(records, args.where)
    if args.paper is not None:
        from cs_systems.report import paper

        for file in paper.write(records, args.paper):
            print(visible(f"paper: {file}"), file=sys.stderr)
        return 0
    if args.figure:
        if args.figure_kind in (None, WATERFALL) and advice is not None and advice.waterfall:
            _draw_waterfall(advice, args.figure)
        elif args.figure_kind == WATERFALL:
            raise ConfigError(f"{args.dir} has no waterfall; cs-systems advise writes one if it keeps a lever")
        else:
            _draw(args.figure, args.figure_kind, records, args.dir)
        if not (
            args.output or args.columns or args.pivot or args.phase or args.format or args.sort or args.relative_to
        ):
            return 0
    deliver(_text(args, records, advice), args.format or "terminal", args.output, args.open)
    return 0


def _records(folder: Path, advice: Advice | None) -> tuple[list[RunRecord], list[str]]:
    """Return the records of a folder; a search of a script has a folder of records for each process."""
    from cs_systems.record import records_path
    from cs_systems.report.advice import records_of_script
    from cs_systems.report.reading import some_records

    if advice is None or records_path(folder).exists():
        return some_records(folder)
    return records_of_script(folder)


def _draw_waterfall(advice: Advice, file: Path) -> None:
    from cs_systems.report.figures import plot
    from cs_systems.report.figures.paper import on_paper
    from cs_systems.report.figures.waterfall import waterfall

    is_paper = plot.check_ending(file) == "pdf"
    plot.write(lambda: on_paper(waterfall(advice)) if is_paper else waterfall(advice), file)
    print(visible(f"figure: {file}"), file=sys.stderr)


def _draw(figure: Path, kind: str | None, records: list[RunRecord], read: Path) -> None:
    """Draw the records of each workload: the first into `figure`, the next into figure-2.svg, and so on.

    Raises ConfigError if no workload has the data.
    """
    from cs_systems.report.figures import plot
    from cs_systems.report.frame import by_kind, without_retried

    workloads = by_kind(without_retried(records))
    drawn = [name for name, own in workloads.items() if (fits := plot.kinds(own)) and kind in (None, *fits)]
    # with no drawn workload, the first one's error says what can be drawn
    for number, name in enumerate(drawn or [*workloads][:1], 1):
        file = figure if number == 1 else figure.with_stem(f"{figure.stem}-{number}")
        check_outputs({"--figure": file}, [read])
        shown = kind or plot.best(workloads[name])
        plot.save(workloads[name], file, shown)
        caption = plot.caption(workloads[name], shown) if file.suffix == ".pdf" else ""
        print(visible(f"figure: {file}{f' ({name})' if len(workloads) > 1 else ''}"), file=sys.stderr)
        if caption:
            print(visible(f"caption: {caption}"), file=sys.stderr)
    if missing := [name for name in workloads if name not in drawn]:
        print(visible(f"no figure of {', '.join(missing)}: these records lack its data"), file=sys.stderr)


def _text(args: Report, records: list[RunRecord], advice: Advice | None) -> str:
    if args.format == "html":
        from cs_systems.report.pages import records as html

        return html.render(records, advice)
    if args.table:
        from cs_systems.report.tables import records_document

        return records_document.tables(records, args.table)
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.report import diagnoses, origins
    from cs_systems.report.advice import levers_of, processes
    from cs_systems.report.tables.formats import paragraph
    from cs_systems.report.tables.records import render

    width, format = terminal_width(args.output), args.format or "terminal"
    columns, phases = args.columns or None, args.phase or None
    table = render(records, format, columns, args.pivot, phases, width, width is not None, args.sort, args.relative_to)
    if args.columns or args.pivot or args.phase or format not in diagnoses.IN:  # these options ask for one table only
        return table
    made = "".join(paragraph(line, format) for line in origins.lines(records))
    if format == "json":
        from cs_systems.report.tables import records_document

        made += records_document.more(records)
    best = [record for record in records if levers_of(record) == advice.best] if advice and advice.best else records
    text = diagnoses.text(diagnose(best), format, width) + table + (f"\n{made}" if made else "")
    if advice is None:
        return text
    if format != "json" and (rows := processes(records)):
        text = f"{diagnoses.text(diagnose(best), format, width)}{made}{_each(args.dir, format, width)}\n"
        return _searched(advice, format, width, rows) + text
    return _searched(advice, format, width) + (text if records or format == "json" else "")


def _each(folder: Path, format: str, width: int | None) -> str:
    """Return the command that shows each process of a search."""
    from cs_systems.report.tables.formats import paragraph, text_width

    words = ("cs-systems", "report", folder, "--columns", "levers", "repeat", "median_ms", "range_s")
    if format != "terminal":
        return paragraph(f"each process: {command_line(*words)}", format).rstrip()
    return labelled_command("each process: ", words, text_width(width))


def _searched(advice: Advice, format: str, width: int | None, rows: Sequence[ProcessRow] = ()) -> str:
    """Return the answer of a search: its sentences, the kept levers, the other options, and the processes."""
    from cs_systems.report.advice import PROCESSES
    from cs_systems.report.diagnoses import line
    from cs_systems.report.tables.rows import render_table

    said = "".join(line(sentence, format, width) + "\n" for sentence in advice.sentences)
    shown: list[tuple[Table[Any], Sequence[Any]]] = [*advice.tables, *([(PROCESSES, rows)] if rows else [])]
    tables = (render_table(table, rows, format, (), width, width is not None) for table, rows in shown)
    return "\n".join([said, *tables]) + "\n"
