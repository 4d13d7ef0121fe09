"""Text of several files at once: the ranks of one job merged, or a list of what each file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cs_systems.cli._analyze import Analyze, check_what_if, origin, read_profiles
from cs_systems.cli._options import given, refuse
from cs_systems.cli._output import RAW, joined
from cs_systems.cli._tables import (
    MOST_REASONS,
    Section,
    answer_text,
    check_top,
    chosen_tables,
    document_text,
    first_reasons,
    first_rows,
    is_short,
    none_readable,
)
from cs_systems.config import ConfigError
from cs_systems.core.formats import recognised
from cs_systems.core.printable import command_line
from cs_systems.core.units import counted
from cs_systems.core.validation import option

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.inventory import FileRow
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.core.sources import Source


class OfRank(NamedTuple):
    """Trace of one rank: `process` is the pid of the rank where one export holds several."""

    source: Source
    rank: int
    process: int | None


def no_file(args: Any, what: str) -> ConfigError:
    """Return the error of a command that got no files, perhaps because an option with several values took them."""
    for name in given(args):
        values = getattr(args, name)
        words = values if isinstance(values, tuple) else ()
        if taken := next((word for word in words if isinstance(word, str) and Path(word).exists()), None):
            return ConfigError(
                f"no file is given, because {option(name)} took {taken} as a value; write the files before the options"
            )
    return ConfigError(f"no file is given; give {what}")


def refuse_unused(given: Sequence[Path], sources: Sequence[Source], what: str) -> None:
    """Raise ConfigError if one of the paths given contains none of the sources: it would be ignored."""
    for path in given:
        if all(source.given != path for source in sources):
            raise ConfigError(f"{path} contains no {what}; leave it out")


def ranks_in(sources: Sequence[Source], wanted: bool) -> list[OfRank] | None:
    """Return the ranks of the job that the files come from; None if the files are not of one job or this is unknown.

    Raises ConfigError if ranks are wanted and there is only one rank.
    """
    from cs_systems.analysis.attribution.inventory import traces_in
    from cs_systems.readers import ranks_of, read

    traces = traces_in(sources)
    if not traces or (len(traces) == 1 and not wanted):
        return None
    if len(traces) == 1:
        one = traces[0]
        format = recognised(one.path)
        pids = format.processes(one.path) if format and format.processes else []
        if len(pids) < 2:
            read(one.path)  # refuse a missing or damaged file for that reason
            raise ConfigError(
                f"--ranks merges the traces of several ranks, but {one.label} is of one rank; give the traces of the "
                "other ranks too, or leave out --ranks"
            )
        return [OfRank(one, rank, pid) for rank, pid in enumerate(pids)]
    found = ranks_of([source.path for source in traces], only_if_certain=not wanted)
    return None if found is None else [OfRank(source, found[source.path], None) for source in traces]


def ranks_inside(args: Analyze, source: Source, profile: Profile) -> list[OfRank] | None:
    """Return the ranks of a job that one file holds; None if it holds one process, or if --process chooses one."""
    from cs_systems.analysis.attribution.kernel_families import family

    kernels = profile.trace.kernels.function.values
    if len(profile.trace.processes) < 2 or args.process is not None or args.table or args.format == "html":
        return None
    if not any(family(function.name) == "collective" for function in kernels):
        return None
    return ranks_in([source], wanted=True)


def ranks_text(args: Analyze, ranks: Sequence[OfRank]) -> str:
    """Return the tables of a job: its ranks and its collectives."""
    from cs_systems.analysis.comparison.ranks import TABLES, in_words, leading, merged, straggler, summary
    from cs_systems.analysis.diagnosis import apply_rules
    from cs_systems.analysis.diagnosis._evidence import of_job

    if args.what_if:
        return _what_ifs(args, ranks)
    tables = chosen_tables(args.table, TABLES, False, args.format, args.top)
    check_top(args.top, tables, TABLES)
    if args.process is not None and any(one.process is not None for one in ranks):
        refuse(
            ["process"], "--process has no effect, because the ranks are the processes of the file and all are merged"
        )
    # Only one trace is in memory at a time.
    job = merged([summary(read_profiles(args, [one.source], one.process)[0], one.rank) for one in ranks])
    sections: list[Section] = []
    for name in tables:
        rows = TABLES[name](job)
        if not rows and not args.table:
            continue
        shown, more = (rows, 0) if is_short(args) else first_rows(TABLES[name], rows, args.top, args.format)
        sections.append((TABLES[name], shown, [f"{counted(more, 'more row')}; --top shows more"] if more else []))
    first = job.ranks[0]
    given_paths = dict.fromkeys(str(one.source.given) for one in ranks)
    where = next(iter(given_paths)) if len(given_paths) == 1 else f"{first.source} …"
    heading = [
        f"{where} · {first.profiler} · {len(job.ranks)} ranks of one job · {counted(first.steps, 'step')}",
        *origin(ranks[0].source, first.job),
        "measured under a profiler: use these times for shares and causes, not as timings",
        *in_words(job),
        *job.notes,
    ]
    answer = None
    if not args.table:
        late = straggler(job)
        number = late.rank if late else leading(job).rank
        one = next(one for one in ranks if one.rank == number)  # its causes are the causes of the step
        answer = apply_rules(of_job(job, number, read_profiles(args, [one.source], one.process)[0]))
    title = f"{len(job.ranks)} ranks of {where}"
    if args.format == "html" and not args.table:
        from cs_systems.analysis.comparison.rank_timeline import view
        from cs_systems.analysis.diagnosis import NO_ANSWER
        from cs_systems.report.pages.ranks import render

        texts = answer_text(args, heading, sections, answer)
        return render(view(job), title, texts, answer or NO_ANSWER)
    return joined(answer_text(args, heading, sections, answer), args.format, title, answer=answer)


def _what_ifs(args: Analyze, ranks: Sequence[OfRank]) -> str:
    """Return the predicted step time of the job after the changes of --what-if."""
    from cs_systems.analysis.replay import replayed
    from cs_systems.analysis.replay.ranks import together
    from cs_systems.analysis.replay.what_ifs import of_ranks, what_if

    check_what_if(args)
    ordered = sorted(ranks, key=lambda one: one.rank)
    rows, notes = of_ranks(
        together([replayed(read_profiles(args, [one.source], one.process)[0]) for one in ordered]), args.what_if
    )
    heading = [f"{ordered[0].source.given} … · {len(ordered)} ranks of one job"]
    return "\n".join(document_text(args.format, heading, [(what_if, rows, notes)], args.output))


def inventory_text(args: Analyze, sources: Sequence[Source]) -> str:
    """Return the list of files with their contents, and the commands that read them."""
    from cs_systems.analysis.attribution.inventory import (
        FILES,
        HOLDS,
        row_of_error,
        row_of_other,
        row_of_profile,
        traces_in,
    )
    from cs_systems.readers._paths import cells_of

    traces = traces_in(sources)
    options = {*given(args)} - {"files", "format", "output", "process", "range", "between", "no_cache", "open"}
    if options:
        named = " ".join(map(option, sorted(options)))
        merge = ", or add --ranks if the files are the ranks of one job"
        raise ConfigError(
            f"{named} cannot be applied to {len(sources)} files at once, which are only listed; give one file, or "
            f"leave out {named}{merge if len(traces) > 1 and 'ranks' not in options else ''}"
        )
    folders = {source.path.parent: cells_of(source.path.parent) for source in sources}
    rows: list[FileRow] = []
    reasons: list[str] = []
    doubts: list[str] = []
    for source in sources:
        if source not in traces:
            if row := row_of_other(source):
                rows.append({**row, "cell": folders[source.path.parent].get(source.path.name)})
            continue
        try:
            profile = read_profiles(args, [source])[0]
            doubts += [f"{source.label}: {profile.incomplete}"] if profile.incomplete else []
            row = row_of_profile(source, profile)
            rows.append({**row, "cell": folders[source.path.parent].get(source.path.name)})
        except ConfigError as error:
            rows.append(row_of_error(source))
            reasons.append(str(error))
    if len(reasons) == len(rows):
        raise ConfigError(none_readable(reasons))
    notes = [*first_reasons(reasons), *doubts[:MOST_REASONS]]
    if ignored := len(sources) - len(rows):
        notes.append(f"not listed: {counted(ignored, 'other file')} (no trace, snapshot or records)")
    from cs_systems.core.sources import is_archive

    roots = {source.given for source in sources}
    if any(is_archive(root) for root in roots):
        notes.append("to analyze one of them, unpack the archive")
    else:
        for command in dict.fromkeys(row["command"] for row in rows if row["command"]):
            example = next(row["file"] for row in rows if row["command"] == command)
            notes.append(f"read one with: {command_line('cs-systems', command, example)}")
    if args.format not in RAW and len(roots) == 1:
        rows = [{**row, "file": _inside(row["file"], roots)} for row in rows]
    sections: list[Section] = [(FILES, rows, notes)]
    if args.format != "csv":
        sections.insert(0, (HOLDS, rows, []))
    where = ", ".join(map(str, sorted(roots)[:3])) + (" …" if len(roots) > 3 else "")
    said = "the files are not known to be ranks of one job: each is listed, none analyzed"
    opening = said if args.format == "html" else ""  # elsewhere it is a line of the heading
    heading = [f"{where} · {counted(len(rows), 'file')}", *([] if opening else [said])]
    texts = document_text(args.format, heading, sections, args.output)
    return joined(texts, args.format, f"Files of {where}", opening=opening)


def _inside(label: str, roots: set[Path]) -> str:
    """Return the name of a file relative to the folder or archive, if only one was given."""
    (root,) = roots
    return label.removeprefix(str(root)).lstrip("/:")
