"""Options of `ab`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from cs_systems.cli import _output
from cs_systems.cli._options import Int, MaybeFloat, MaybePath, MaybeText, Names, Paths, flag, one_name, optional

MEASURES = ("auto", "steps", "process")
if TYPE_CHECKING:
    AbFormat = str
    Measure = str
else:
    AbFormat = Annotated[object, one_name("format", _output.TABLE_FORMATS)]
    Measure = Annotated[object, one_name("measure", MEASURES)]


@dataclass(frozen=True)
class Ab:
    a: Annotated[
        Positional[str],
        arg(metavar="A", help="baseline: a command in quotes, a .py file, or a git revision", help_behavior_hint=""),
    ] = ""
    b: Annotated[Positional[str], arg(metavar="B", help="candidate, of the same kind", help_behavior_hint="")] = ""
    rest: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="-- ARGUMENTS ...",
            help="arguments of both files; for revisions, the script with its arguments",
            help_behavior_hint="",
        ),
    ] = ()
    find: Annotated[MaybeText, optional("SHARE", "difference to find or to exclude", "--fail-if's, else 3%")] = None
    fail_if: Annotated[
        Names,
        arg(
            metavar="slower:SHARE [undecided]",
            help="exit with status 1 if the candidate is slower, and by this share possibly; or if there is no verdict",
            help_behavior_hint="(default: never)",
        ),
    ] = ()
    budget: Annotated[str, arg(metavar="TIME", help="time for all processes, such as 90s, 10m or 1h")] = "10m"
    max_pairs: Annotated[Int, arg(help="largest number of pairs")] = 100
    measure: Annotated[
        Measure, arg(help="what is compared: the steps of a loop, the whole process, or steps if any")
    ] = "auto"
    steps: Annotated[
        str, arg(metavar="FIRST:LAST", help="compare the steps after the first number, up to the last")
    ] = "5:25"
    setup: Annotated[
        MaybeText, optional("COMMAND", "prepare an own environment of each revision by it, as 'pip install -e .'")
    ] = None
    link: Annotated[
        Paths,
        arg(
            help="data outside of git to show in both revisions by a link; write it after A and B",
            help_behavior_hint="",
        ),
    ] = ()
    timeout_s: Annotated[MaybeFloat, optional("SECONDS", "stop a process that takes longer")] = None
    out: Annotated[MaybePath, optional("DIR", "folder to keep the records of all processes in")] = None
    format: Annotated[AbFormat, arg(help="output format")] = "terminal"
    output: Annotated[MaybePath, optional("FILE", "file for the output, instead of the terminal")] = None
    dry_run: Annotated[bool, flag("say what would be compared, and run nothing")] = False
