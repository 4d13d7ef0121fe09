"""Analyze a CUDA memory snapshot of any PyTorch program: the peak, its categories and the largest allocations.

Also shows where allocations were made, fragmentation, and the allocations left at the end. For two files, shows the
difference of the peaks; for more, a folder or an archive (.zip, .tar.gz), the peak of each.

The file is read as data: a pickle with anything but numbers, strings, lists and dicts is refused. To record one, call
torch.cuda.memory._record_memory_history() before and torch.cuda.memory._dump_snapshot(FILE) after the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from cs_systems.analysis.memory.tables import AT_HIGHEST, AT_PEAK, TABLES, tables_at
from cs_systems.cli._files import no_file, refuse_unused
from cs_systems.cli._options import MaybeInt, MaybePath, MaybeText, Names, Paths, given, optional, refuse
from cs_systems.cli._output import RAW, Format, Open, check_outputs, compared, deliver, joined, page_asked
from cs_systems.cli._tables import (
    All,
    Section,
    answer_text,
    check_all,
    check_top,
    chosen_tables,
    document_text,
    first_reasons,
    none_readable,
)
from cs_systems.config import PRESETS, ConfigError
from cs_systems.core.formats import command_for, refuse_other, suffixes
from cs_systems.core.sources import Source, opened
from cs_systems.core.units import counted
from cs_systems.record import Row

if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis import Answer
    from cs_systems.analysis.memory.categories import Attribution
    from cs_systems.analysis.memory.tensor_names import TensorNames

MOST_ROWS_OF_PAGE = 100
IF_ANY = ("annotations", "out_of_memory")  # left out if empty, unless --table names them
DIFFERENT = {"category": "category", "layer": "layer", "site": "source line"}


@dataclass(frozen=True)
class SnapshotArgs:
    files: Annotated[
        Positional[Paths],
        arg(
            metavar="PATH [PATH ...]",
            help="a snapshot (a .pickle of torch.cuda.memory._dump_snapshot()), two to compare, or more: files, a "
            "folder or an archive",
            help_behavior_hint="",
        ),
    ] = ()
    table: Annotated[
        Names, arg(help=f"tables to show: {', '.join(TABLES)}", help_behavior_hint="(default: a short answer)")
    ] = ()
    all: All = False
    device: Annotated[MaybeInt, optional("N", "device to analyze, if the file has several", "all")] = None
    top: Annotated[MaybeInt, optional("N", "number of rows of long tables", "10; in CSV all")] = None
    size: Annotated[MaybeText, optional("PRESET", f"model, to name the tensors: {', '.join(PRESETS)}", "inferred")] = (
        None
    )
    format: Annotated[Format, arg(help="output format; html: a page with a timeline")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None
    open: Open = False


ARGS = SnapshotArgs


def run(args: SnapshotArgs) -> int:
    """Show the snapshot; return exit status 0.

    Raises ConfigError for a malformed request, or a file that is not a snapshot.
    """
    if not args.files:
        raise no_file(args, "a snapshot, several, a folder or an archive")
    args = page_asked(args)
    check_all(args)
    check_outputs({"--output": args.output}, args.files)
    from cs_systems.core.collector import without_collector

    files = suffixes("memory")
    with opened(args.files, (*files, *(f"{end}.json" for end in files))) as sources, without_collector():
        text = _text(args, [source for source in sources if not source.is_inside or _is_snapshot(source)])
    deliver(text, args.format, args.output, args.open)
    return 0


def _is_snapshot(source: Source) -> bool:
    return command_for(source.path) == "snapshot"


def _text(args: SnapshotArgs, sources: Sequence[Source]) -> str:
    if not sources:
        run = next((path for path in args.files if path.is_dir() and command_for(path) == "report"), None)
        if run is None:
            for path in args.files:
                refuse_other(path, "snapshot")
        raise ConfigError(
            f"{run or args.files[0]} contains no snapshot; give the .pickle that torch.cuda.memory._dump_snapshot() or "
            f"cs-systems memory --snapshot wrote{f', or read its records with cs-systems report {run}' if run else ''}"
        )
    refuse_unused(args.files, sources, "snapshot")
    if len(sources) > 2 or (len(sources) == 2 and any(source.is_inside for source in sources)):
        return _peaks(args, sources)
    compares = len(sources) == 2
    tables = chosen_tables(args.table, DIFFERENT if compares else TABLES, compares, args.format, args.top)
    if args.format == "html" and not compares and args.table:
        raise ConfigError("--format html shows every table of one snapshot; leave out --table")
    if not compares:
        check_top(args.top, tables, TABLES)
    if compares and args.size is not None:
        refuse(["size"], "--size names the tensors of one snapshot, and two were given")
    if compares and args.all:
        refuse(["all"], "a comparison of two snapshots shows every table")
    if compares:
        from cs_systems.analysis.memory.tables import differences
        from cs_systems.cli._snapshot_text import difference_opening

        a, b = pair = [_read(source, args.device, every=False)[0] for source in sources]
        opening = difference_opening(a, b, differences(a, b, lambda _, one: one.category))
        title = f"Memory of {compared(sources[0].path, sources[1].path)}"
        texts = _comparison(args, tables, sources, pair)
        return joined(texts, args.format, title, opening=opening, output=args.output)
    found = _read(sources[0], args.device)
    if len(found) > 1 and args.format in ("html", "csv"):
        numbers = " or ".join(str(one.replay.snapshot.device) for one in found)
        raise ConfigError(f"--format {args.format} shows one device; choose it with --device {numbers}")
    if args.format == "html":
        return _page(args, found[0], sources[0])
    if len(found) > 1:
        return "\n".join(_devices(args, tables, found, sources[0]))
    return "\n".join(_tables(args, tables, found[0], _recorded(sources[0], found[0])))


def _read(source: Source, device: int | None, every: bool = True) -> list[Attribution]:
    """Return the memory of the device; without one, of `every` device, or refuse a file that has several."""
    from cs_systems.analysis.memory.allocations import replay
    from cs_systems.analysis.memory.categories import attribute
    from cs_systems.readers.snapshot import read, read_all

    found = read_all(source.path) if device is None and every else [read(source.path, device)]
    return [attribute(replay(replace(one, source=source.label))) for one in found]


def _recorded(source: Source, found: Attribution) -> list[str]:
    """Return when and by which command a snapshot was recorded, as far as it is known."""
    from cs_systems.report import origins

    began_us = found.replay.snapshot.events.time_us[:1]
    return origins.of_file(source.path, began_us[0] * 1e-6 if began_us else None)


def _peaks(args: SnapshotArgs, sources: Sequence[Source]) -> str:
    """Return one row per snapshot. If the snapshots are the ranks of a job, the first row summarizes all."""
    from cs_systems.analysis.diagnosis._together import together
    from cs_systems.analysis.memory.tables import FILES, file_row
    from cs_systems.analysis.memory.tensor_names import tensor_names
    from cs_systems.readers.forms.jobs import ranks_by_name

    options = {*given(args)} - {"files", "device", "format", "output", "open"}
    refuse(sorted(options), f"of {len(sources)} snapshots, only the peaks are shown")
    ranks = ranks_by_name([source.path for source in sources], only_by_word=True)
    rows, reasons = [], []
    answers: dict[str, Answer] = {}
    for source in sources:
        try:
            found = _read(source, args.device)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        rows += [file_row(one, source.label) for one in found]
        for one in found if len(ranks) == len(sources) else ():
            device = f", device {one.replay.snapshot.device}" if len(found) > 1 else ""
            answers[f"rank {ranks[source.path]}{device}"] = _answer(one, tensor_names(one))
    if not rows:
        raise ConfigError(none_readable(reasons))
    files = f"{', '.join(map(str, args.files[:3]))}{' …' if args.files[3:] else ''}"
    heading = [
        f"{files} · {len(sources)} snapshots{' of the ranks of one job, the highest peak first' * bool(answers)}"
    ]
    if answers:
        rows = sorted(rows, key=lambda row: -(row["peak_bytes"] or 0))
    answer = together(answers, "ranks") if answers else None
    sections: list[Section] = [(FILES, rows, first_reasons(reasons))]
    title = f"Memory of {len(sources)} snapshots"
    texts = document_text(args.format, heading, sections, args.output, answer)
    return joined(texts, args.format, title, answer=answer)


def _devices(args: SnapshotArgs, tables: Sequence[str], found: Sequence[Attribution], source: Source) -> list[str]:
    """Return a table of all devices, then each device's tables: only the composition, unless --table names others."""
    from cs_systems.analysis.diagnosis._together import together
    from cs_systems.analysis.memory.tables import devices
    from cs_systems.analysis.memory.tensor_names import tensor_names

    overview: Section = (devices, devices(found), [])
    heading = [f"{source.label} · {len(found)} devices", *_recorded(source, found[0])]
    answers = {f"device {one.replay.snapshot.device}": _answer(one, tensor_names(one, args.size)) for one in found}
    text = document_text(
        args.format, heading, [overview], args.output, None if args.table else together(answers, "devices")
    )
    chosen = tables if args.table or args.all else ["composition", "out_of_memory"]
    return [*text, *(line for one in found for line in _tables(args, chosen, one, is_answered=True))]


def _tables(
    args: SnapshotArgs,
    tables: Sequence[str],
    found: Attribution,
    recorded: Sequence[str] = (),
    is_answered: bool = False,
) -> list[str]:
    from cs_systems.analysis.memory.tensor_names import tensor_names
    from cs_systems.cli._snapshot_text import doubt, heading, shown_moment

    names = tensor_names(found, args.size)
    answer = None if args.table or is_answered else _answer(found, names)
    declared = tables_at(shown_moment(found))
    sections: list[Section] = []
    for name in tables:
        rows, remarks = _table(name, found, names, args.top or (None if args.format in RAW else 10))
        if not rows and name in IF_ANY and not args.table:
            continue
        sections.append((declared[name], rows, remarks))
    return answer_text(args, heading(found, names, recorded), sections, answer, doubt(found))


def _answer(found: Attribution, names: TensorNames) -> Answer:
    from cs_systems.analysis.diagnosis import apply_rules
    from cs_systems.analysis.diagnosis._evidence import of_snapshot

    return apply_rules(of_snapshot(found, names))


def _table(name: str, found: Attribution, names: TensorNames, top: int | None) -> tuple[Sequence[Row], list[str]]:
    """Return the rows and notes of a table; a long table is cut to `top` rows."""
    from cs_systems.cli._snapshot_text import notes

    rows = TABLES[name](found, names)
    remarks = notes(name, found, rows)
    if not TABLES[name].most or top is None or not rows[top:]:
        return rows, remarks
    first, where = 0, ""
    if name == "timeline":
        peak = next((n for n, row in enumerate(rows) if row["is_peak"]), None)
        if peak is not None:
            first, where = max(0, min(peak - top // 2, len(rows) - top)), ", around the peak"
    more = f"{counted(len(rows) - top, 'more row')}{where}; --top shows more"
    return rows[first : first + top], [*remarks, more]


def _page(args: SnapshotArgs, found: Attribution, source: Source) -> str:
    from cs_systems.analysis.memory.tensor_names import tensor_names
    from cs_systems.analysis.memory.timeline import view
    from cs_systems.cli._snapshot_text import heading
    from cs_systems.report.pages.snapshot import render

    names = tensor_names(found, args.size)
    tables = {name: _table(name, found, names, args.top or MOST_ROWS_OF_PAGE) for name in TABLES}
    title = f"Memory of {args.files[0].name}"
    lines = heading(found, names, _recorded(source, found))
    return render(view(found, names), tables, lines, title, _answer(found, names))


def _comparison(
    args: SnapshotArgs, tables: Sequence[str], sources: Sequence[Source], found: Sequence[Attribution]
) -> list[str]:
    from cs_systems.analysis.memory.tables import differences, where
    from cs_systems.cli._snapshot_text import difference_heading

    a, b = found
    heading = difference_heading(a, b, *map(_recorded, sources, found))
    by = {"category": lambda _, a: a.category, "layer": lambda _, a: a.layer or "no layer", "site": where}
    sections: list[Section] = []
    for name in tables:
        rows = differences(a, b, by[name])
        remarks = []
        top = args.top or (len(rows) if args.format in RAW else 10)
        if rows[top:]:
            remarks.append(f"{counted(len(rows) - top, 'more row')}; --top shows more")
        when = AT_PEAK if a.replay.has_peak and b.replay.has_peak else AT_HIGHEST
        caption = f"memory {when} by {name}, candidate compared with baseline"
        sections.append(
            (replace(differences, caption=caption, headings={"what": DIFFERENT[name]}), rows[:top], remarks)
        )
    return document_text(args.format, heading, sections, args.output)
