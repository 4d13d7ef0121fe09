"""Analyze traces: kernel time by phase, family and layer, and the time the GPU was idle.

For two files, shows how the second differs. For a report of ncu, shows the counters of each kernel; for a profile of
Triton's Proton, its scopes. For the traces of several ranks of one job, shows what each rank did, who waited for whom,
and the bandwidth of each collective. For other files, a folder or an archive (.zip, .tar.gz), lists what each holds.

Times under a profiler show shares and causes; to know how long a step takes, use `cs-systems time`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.comparison import SIDES
from cs_systems.cli._analyze import OF_RANKS, OF_TRACE, Analyze, check_what_if, read_profiles, recorded
from cs_systems.cli._files import inventory_text, no_file, ranks_in, ranks_inside, ranks_text, refuse_unused
from cs_systems.cli._options import given, refuse
from cs_systems.cli._output import check_outputs, compared, deliver, joined, page_asked
from cs_systems.cli._tables import (
    SHARES,
    Section,
    answer_text,
    check_all,
    check_top,
    chosen_tables,
    document_text,
    first_rows,
    is_short,
)
from cs_systems.config import ConfigError
from cs_systems.core.formats import TIMELINE, offered, refuse_other, suffixes
from cs_systems.core.printable import labelled_command, visible
from cs_systems.core.range_names import SPLITS
from cs_systems.core.tables import Row
from cs_systems.core.units import counted
from cs_systems.core.validation import listed, option

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.analysis.diagnosis import Answer
    from cs_systems.core.sources import Source

ARGS = Analyze


def run(args: Analyze, merges: bool = True) -> int:
    """Analyze the files; return exit status 0.

    merges: whether two traces of different ranks of one job are merged; else they are compared.

    Raises ConfigError for a malformed request, or a file from which no correct table can be made.
    """
    if not args.files:
        raise no_file(args, "a trace, the traces of all ranks, a folder or an archive")
    args = page_asked(args)
    check_all(args)
    if args.export is not None:
        from cs_systems.report import chrome_trace

        chrome_trace.check(args.export)
    check_outputs({"--output": args.output, "--export": args.export}, args.files)
    _check_between(args)
    from cs_systems.core.sources import opened

    with opened(args.files, suffixes()) as sources:
        text = _text(args, sources, merges)
    deliver(text, args.format, args.output, args.open)
    return 0


def _refuse_export(args: Analyze, instead: str = "") -> None:
    refuse(["export"] * (args.export is not None), f"--export writes the trace of one process{instead}")


def _check_between(args: Analyze) -> None:
    """Raise ConfigError unless --between has two times in order, and no --range marks other steps."""
    if not args.between:
        return
    typed = " ".join(f"{time:.15g}" for time in args.between)
    if len(args.between) != 2:
        raise ConfigError(f"--between takes two times, got {typed}; write --between T0 T1, such as --between 0 1.5")
    first, last = args.between
    if args.range:
        raise ConfigError(
            f"--between {typed} and --range {args.range} both choose the steps to analyze; leave out one of them"
        )
    if first > last:
        raise ConfigError(f"--between {typed} ends before it begins; swap the two times")
    if first == last:
        raise ConfigError(f"--between {typed} is empty, because both times are equal; give a later second time")


def _text(args: Analyze, sources: Sequence[Source], merges: bool) -> str:
    from cs_systems.analysis.attribution.inventory import format_of, traces_in

    held = {
        source: (found.holds, found.read)
        for source in sources
        if (found := format_of(source)) and found.read and found.command == "analyze"
    }
    readable = [source for source in sources if not source.is_inside or source in held]
    if readable:
        refuse_unused(args.files, readable, "trace")
    if merges and (ranks := ranks_in(sources, args.ranks)):
        _refuse_export(args)
        return ranks_text(args, ranks)
    if len(sources) == 2 and len(traces_in(sources)) == 2 and not any(source.is_inside for source in sources):
        return _tables_of_traces(args, sources)
    if len(readable) == 1:
        holds, read = held.get(readable[0], (TIMELINE, None))
        other = {"counters": _counters, "scopes": _scopes}.get(holds)
        return other(args, readable[0], read) if other and read else _tables_of_traces(args, readable)
    if not readable:
        for path in (*args.files, *(source.path for source in sources)):
            refuse_other(path, "analyze")
        raise ConfigError(listed(f"{args.files[0]} contains no trace; give a folder of traces, or", offered("analyze")))
    _refuse_export(args)
    return inventory_text(args, sources)


def _tables_of_traces(args: Analyze, sources: Sequence[Source]) -> str:
    from cs_systems.analysis.attribution.timeline import DECLARED

    compares = len(sources) == 2
    if args.what_if:
        if compares:
            raise ConfigError("--what-if replays one trace; give one file")
        return _what_ifs(args, sources[0])
    known = SPLITS if compares else OF_TRACE
    if of_ranks := [name for name in args.table if name in OF_RANKS and name not in known]:
        raise ConfigError(
            f"--table {of_ranks[0]} requires the traces of several ranks; give all of them and add --ranks, "
            f"or choose among {', '.join(known)}"
        )
    tables = chosen_tables(args.table, known, compares, args.format, args.top)
    if compares:
        refuse([name for name in ("all", "top") if getattr(args, name)], "a comparison of two traces shows every row")
    check_top(args.top, tables, DECLARED)
    if args.format == "html" and not compares:
        unfit = [name for name in ("table", "top") if getattr(args, name)]
        refuse(unfit, "a page (--format html or --open) always shows every table")
    if compares:
        _refuse_export(args)
    profiles = read_profiles(args, sources)
    if not compares and (ranks := ranks_inside(args, sources[0], profiles[0])):
        _refuse_export(args, "; choose one with --process")
        return ranks_text(args, ranks)
    if args.export is not None:
        from cs_systems.report import chrome_trace

        chrome_trace.write(profiles[0], _answer(profiles[0]), args.export)
        print(visible(f"export: {args.export} (open it in ui.perfetto.dev)"), file=sys.stderr)
    if args.format == "html" and not compares:
        from cs_systems.analysis.attribution.range_tree import range_tree
        from cs_systems.analysis.attribution.timeline import results, view
        from cs_systems.analysis.replay import replayed
        from cs_systems.report.pages.profile import render

        shown = {**results(profiles[0]), "range_tree": range_tree(profiles[0])}
        title = f"{sources[0].path.name}, by {profiles[0].trace.profiler}"
        origin = recorded(sources[0], profiles[0])
        return render(view(profiles[0]), shown, title, _answer(profiles[0]), origin, replayed(profiles[0]))
    if compares:
        from cs_systems.analysis.comparison.profiles import opening

        title = compared(sources[0].path, sources[1].path)
        texts = _comparison(args, tables, sources, profiles)
        return joined(texts, args.format, title, opening=opening(*profiles), output=args.output)
    return "\n".join(_analysis(args, tables, sources[0], profiles[0]))


def _what_ifs(args: Analyze, source: Source) -> str:
    """Return the durations of a step that are expected after the changes of --what-if."""
    from cs_systems.analysis.replay import replayed
    from cs_systems.analysis.replay.what_ifs import change, notes, what_if

    changes = {text: change(text) for text in args.what_if}
    check_what_if(args)
    (profile,) = read_profiles(args, [source])
    replay = replayed(profile)
    answers = {text: replay.what_if(one) for text, one in changes.items()}
    sections: list[Section] = [(what_if, what_if(replay, answers), notes(replay, answers))]
    return "\n".join(document_text(args.format, _heading(source, profile), sections, args.output))


def _counters(args: Analyze, source: Source, read: Callable[[Path], Any]) -> str:
    from cs_systems.cli._counters import counters_text

    _only(args, source, "counters of kernels", "--format (not html) and --output", {"format", "output"})
    rows = read(source.path)
    return "\n".join(counters_text(f"{source.label} · ncu · {len(rows)} kernels", rows, args.format, args.output))


def _scopes(args: Analyze, source: Source, read: Callable[[Path], Any]) -> str:
    from cs_systems.cli._scopes import KNOWN, scopes_text

    allowed = "--table, --top, --format (not html) and --output"
    _only(args, source, "scopes of Triton's Proton", allowed, {"table", "top", "format", "output"})
    tables = chosen_tables(args.table, KNOWN, False, args.format, args.top)
    return "\n".join(scopes_text(read(source.path), tables, args.top, args.format, args.output))


def _only(args: Analyze, source: Source, holds: str, allowed: str, names: Set[str]) -> None:
    """Raise ConfigError for options that do not apply to the contents of the file."""
    unfit = [option(name) for name in given(args) if name not in {"files", "no_cache", "open", *names}]
    unfit += ["--open" if args.open else "--format html"] if args.format == "html" else []
    if unfit:
        raise ConfigError(
            f"{' '.join(unfit)} cannot be used with {source.label}, which contains {holds}; use only {allowed}"
        )


def _analysis(args: Analyze, tables: Sequence[str], source: Source, profile: Profile) -> list[str]:
    from cs_systems.analysis.attribution import module_tables, operator_table
    from cs_systems.analysis.attribution.tables import NO_COSTS, TABLES, has_something, notes
    from cs_systems.analysis.attribution.timeline import DECLARED

    sections: list[Section] = []
    made: dict[str, Sequence[Row]] = {name: DECLARED[name](profile, NO_COSTS) for name in tables}
    if not args.table:
        may_be_empty = TABLES if profile.trace.kernels else {}
        made = {n: rows for n, rows in made.items() if has_something(n, rows) or (n in may_be_empty and not rows)}
        if not profile.trace.kernels:
            made = {n: rows for n, rows in made.items() if n in (*TABLES, "operators")}
    filled = "" if not args.table or all(made.values()) else _filled_tables(profile)
    said = set[str]()  # a note about the whole profile is printed only under the first table
    for name, rows in made.items():
        if name in module_tables.TABLES:
            remarks = module_tables.notes(name, profile, rows)
        elif name == "operators":
            remarks = operator_table.notes(profile, rows)
        else:
            remarks = notes(name, profile, rows)
        if name == "layers" and (reason := module_tables.why_nothing(profile)):
            remarks.append(reason)
        if not rows and args.table:
            remarks.append(filled)
        remarks = [remark for remark in remarks if remark not in said]
        said.update(remarks)
        if not rows and not remarks and not args.table:
            continue
        shown, more = (rows, 0) if is_short(args) else first_rows(DECLARED[name], rows, args.top, args.format)
        if name == "kernels" and more:
            rest = sum(row["share"] for row in rows[len(shown) :])
            remarks.append(f"{rest:.1%} of the time is in {counted(more, 'more kernel')}; --top shows more")
        elif more:
            remarks.append(f"{more} more {'ranges' if name == 'range_tree' else name}; --top shows more")
        sections.append((DECLARED[name], shown, remarks))
    found = None if args.table else _answer(profile)
    heading = _heading(source, profile)
    text = answer_text(args, heading, sections, found, profile.incomplete)
    if found and is_short(args) and args.format == "terminal":
        text[-1] += _try(args, source, found)
    return text


def _try(args: Analyze, source: Source, answer: Answer) -> str:
    """Return the command that would try the first remedy with a lever, as a line; "" without one."""
    from cs_systems.cli._advice import try_after_trace
    from cs_systems.cli._output import terminal_width
    from cs_systems.record import recorded_files
    from cs_systems.report.tables.formats import text_width

    record = recorded_files(source.path.parent).get(source.path.name)
    words = try_after_trace(answer, record)
    return labelled_command("advise:", words, text_width(terminal_width(args.output))) + "\n" if words else ""


def _filled_tables(profile: Profile) -> str:
    """Return the names of the tables with rows, and the reason for empty ones if the trace has no kernels."""
    from cs_systems.analysis.attribution.tables import NO_COSTS, has_something
    from cs_systems.analysis.attribution.timeline import DECLARED

    filled = [name for name, table in DECLARED.items() if has_something(name, table(profile, NO_COSTS))]
    reason = "" if profile.trace.kernels else "the trace has no kernels; "
    return f"{reason}tables with data: {', '.join(filled) or 'none'}"


def _answer(profile: Profile) -> Answer:
    """Return the answer about the steps of a trace."""
    from cs_systems.analysis.diagnosis import apply_rules
    from cs_systems.analysis.diagnosis._evidence import of_profile

    return apply_rules(of_profile(profile))


def _heading(source: Source, profile: Profile) -> list[str]:
    trace, count = profile.trace, len(profile.steps)
    devices = ", ".join(trace.devices.get(device, f"GPU {device}") for device in profile.devices)
    calls = sum(kernels.calls for kernels in profile.by_step.values()) / count
    steps = counted(count, "step") + (f" of {calls:,.0f} kernels" if trace.kernels else "")
    return [
        " · ".join(filter(None, [trace.source, trace.profiler, devices, steps])),
        *recorded(source, profile),
        "measured under a profiler: use these times for shares and causes, not as timings",
        *profile.notes,
    ]


def _comparison(
    args: Analyze, tables: Sequence[str], sources: Sequence[Source], profiles: Sequence[Profile]
) -> list[str]:
    from cs_systems.analysis.comparison.profiles import DIFFERENCES, difference, doubts

    a, b = profiles
    sides = list(zip(SIDES, sources, profiles, strict=True))
    heading = [" · ".join([f"{side}: {source.label}", *recorded(source, profile)]) for side, source, profile in sides]
    heading += [f"{side}: {profile.incomplete}" for side, _, profile in sides if profile.incomplete]
    notes: dict[str, list[str]] = {name: [] for name in tables}
    notes[tables[0]].append(SHARES)
    notes[tables[-1]] += doubts(a, b)
    splits = {name: SPLITS[name] for name in tables}
    sections: list[Section] = [(DIFFERENCES[by], difference(a, b, by), notes[name]) for name, by in splits.items()]
    return document_text(args.format, heading, sections, args.output)
