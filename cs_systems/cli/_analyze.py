"""Options of `analyze`, and the traces read by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from cs_systems.cli._options import (
    Decimals,
    MaybeInt,
    MaybePath,
    MaybeText,
    Names,
    Paths,
    Repeated,
    flag,
    optional,
    refuse,
)
from cs_systems.cli._output import Format, Open
from cs_systems.cli._tables import All
from cs_systems.config import ConfigError
from cs_systems.core.formats import offered
from cs_systems.core.range_names import PHASES
from cs_systems.core.tables import names_in

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.core.sources import Source
    from cs_systems.readers.forms.jobs import Job

_ROOM = "analysis.attribution"
OF_TRACE = names_in(f"{_ROOM}.tables", f"{_ROOM}.range_tree", f"{_ROOM}.operator_table", f"{_ROOM}.module_tables")
WHAT_IFS = (
    "launches=free, host=FACTOR, host:RANGE=FACTOR, input=0, sync=0, copies=overlapped, family:NAME=FACTOR; "
    "of ranks straggler=median"
)
OF_RANKS = names_in("analysis.comparison.ranks")


@dataclass(frozen=True)
class Analyze:
    files: Annotated[
        Positional[Paths],
        arg(
            metavar="PATH [PATH ...]",
            help=", ".join(offered("analyze"))
            + "; two to compare, the traces of all ranks, or a folder or archive of files",
            help_behavior_hint="",
        ),
    ] = ()
    table: Annotated[
        Names,
        arg(
            help=f"tables to show: {', '.join(OF_TRACE)}; of ranks: {', '.join(OF_RANKS)}",
            help_behavior_hint="(default: a short answer)",
        ),
    ] = ()
    all: All = False
    ranks: Annotated[bool, flag("the files, or the processes of one export, are the ranks of one job: merge them")] = (
        False
    )
    range: Annotated[
        MaybeText, optional("NAME", "name or pattern of the ranges that mark one step each", "step, or ProfilerStep#*")
    ] = None
    between: Annotated[
        Decimals, optional("T0 T1", "one step, from T0 to T1 in seconds since the start of the recording")
    ] = ()
    phase: Annotated[
        Repeated, optional("PHASE=NAME", f"name or pattern of the ranges of a phase; repeatable: {', '.join(PHASES)}")
    ] = ()
    range_names: Annotated[
        MaybePath, optional("FILE", "TOML file with names of ranges and their meaning, besides the known ones")
    ] = None
    process: Annotated[MaybeInt, optional("PID", "process to analyze, if the file has several")] = None
    what_if: Annotated[
        Names,
        arg(
            metavar="CHANGE [CHANGE ...]",
            help=f"changes of the program whose step is predicted: {WHAT_IFS}",
            help_behavior_hint="",
        ),
    ] = ()
    top: Annotated[
        MaybeInt, optional("N", "number of kernels, steps, ranges or layers to show", "10, of layers 100; in CSV all")
    ] = None
    no_cache: Annotated[bool, flag("parse every trace again, also if it is unchanged since it was last read")] = False
    format: Annotated[Format, arg(help="output format; html: a page with the timeline")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None
    export: Annotated[
        MaybePath,
        optional("FILE", "also write the trace for Perfetto, with steps, phases, layers and causes: .json.gz"),
    ] = None
    open: Open = False


def check_what_if(args: Analyze) -> None:
    """Raise ConfigError for options that have no effect together with --what-if."""
    refuse([name for name in ("table", "all", "top", "export") if getattr(args, name)], "--what-if shows its own table")
    if args.format == "html":
        raise ConfigError("--what-if has no page; leave out --format html and --open")


def read_profiles(args: Analyze, sources: Sequence[Source], process: int | None = None) -> list[Profile]:
    """Return the profiles of traces, by the options of the command line."""
    from cs_systems.analysis.attribution.inventory import labelled
    from cs_systems.analysis.attribution.known_ranges import with_habits
    from cs_systems.analysis.attribution.profile import profile
    from cs_systems.core.sources import is_archive
    from cs_systems.readers import cached, read

    between = (args.between[0], args.between[1]) if args.between else None
    pid = args.process if process is None else process
    traces = []
    for source in sources:
        in_archive = source.is_inside and is_archive(source.given)  # archives are unpacked into a new folder each time
        traces.append((read if args.no_cache or in_archive else cached)(source.path, pid))
    known = zip(sources, with_habits(traces, args.phase, args.range_names), strict=True)
    return [labelled(profile(trace, args.range, between, notes), source) for source, (trace, notes) in known]


def recorded(source: Source, profile: Profile) -> list[str]:
    """Return when and by which command a trace was recorded, as far as it is known."""
    return origin(source, profile.trace.job)


def origin(source: Source, job: Job | None) -> list[str]:
    """Return when and by which command the trace of one rank was recorded, as far as it is known."""
    from cs_systems.report import origins

    return origins.of_file(source.path, job.began_s if job else None)
