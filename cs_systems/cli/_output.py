"""Output of a command's text: to the terminal at its width, or into a file."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from tyro.conf import arg

from cs_systems.cli import _document
from cs_systems.cli._options import one_name
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.printable import command_line, encodable, visible
from cs_systems.core.tables import Row, Table
from cs_systems.report import files
from cs_systems.report.tables import document

TABLE_FORMATS = ("terminal", "markdown", "latex", "typst", "csv", "json")
RAW = ("csv", "json")  # formats of data for programs, with every column and no words for people
FORMATS = (*TABLE_FORMATS, "html")
if TYPE_CHECKING:
    from cs_systems.analysis.diagnosis import Answer
    from cs_systems.record import RunRecord

    TableFormat = Literal["terminal", "markdown", "latex", "typst", "csv", "json"]
    Format = TableFormat | Literal["html"]
    MaybeFormat = Format | None
else:
    TableFormat = Annotated[object, one_name("format", TABLE_FORMATS)]
    Format = MaybeFormat = Annotated[object, one_name("format", FORMATS)]
Open = Annotated[bool, arg(help="open the page (--format html) in a browser", help_behavior_hint="(default: no)")]
Asked = TypeVar("Asked", bound=Any)  # arguments with format, output and open
Picture = tuple[str, str]
RUN_FILES = ("records*.jsonl", "worker*.log", ".*")  # files that a sweep itself writes into its folder


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; `folder` holds the records so far."""

    def __init__(self, folder: Path) -> None:
        super().__init__("interrupted; the records so far are kept; to continue:")
        self.folder = folder

    def command(self, words: Sequence[str]) -> str:
        """Return the command that continues the sweep, given the words of the interrupted command."""
        kept, skip = list[str](), False
        end = words.index("--") if "--" in words else len(words)
        for word in words[:end]:
            if skip or word == "--fresh" or word.startswith("--out="):
                skip = False
            elif word == "--out":
                skip = True
            else:
                kept.append(word)
        return command_line("cs-systems", *kept, "--out", self.folder, *words[end:])


ROOM_FOR_ASCII = 2  # reserve: lines grow when the arrow is printed as ->


def terminal_width(output: Path | None = None, stream: IO[str] | None = None) -> int | None:
    """Return the width of the terminal for the text, which may be coloured then; None for a pipe or a file.

    stream: where the text goes without `output`; by default standard output.
    """
    stream = stream or sys.stdout
    if output is not None or not is_terminal(stream):
        return None
    own = shutil.get_terminal_size().columns
    if stream is not sys.stdout:
        with suppress(AttributeError, OSError):  # a class of the program may have no `fileno`
            own = os.get_terminal_size(stream.fileno()).columns
    return own - (0 if encodable("→", stream) == "→" else ROOM_FOR_ASCII)


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal; one of the program's own classes may have no `isatty`."""
    return bool(getattr(stream, "isatty", bool)())


def print_table(table: Table[Any], rows: Sequence[Row], notes: Sequence[str] = (), alike: Sequence[str] = ()) -> None:
    """Print the rows of a declared table, or add them to the document of the command.

    `alike` are columns to compare with each other, which share a unit.
    """
    from cs_systems.report.tables.rows import render_table

    if _document.add(document.table(table, rows, notes)):
        return
    width = terminal_width()
    with files.standard_output():
        print(render_table(table, rows, "terminal", notes, width, width is not None, alike))


def deliver(text: str, format: str, output: Path | None, opens: bool = False) -> None:
    """Write the text to the file `output` and print its path, or to standard output.

    Optionally open the file in a browser.
    """
    if format == "json":
        if output is None and _document.add_whole(text):
            return
        _document.leave_elsewhere()
        text = document.document(text)
    if output is None:
        with files.standard_output():
            sys.stdout.write(text)
        return
    files.write_file(output, text.encode(errors="backslashreplace"))
    print(visible(f"{format}: {output}"), file=sys.stderr)
    if opens:
        import webbrowser

        if not webbrowser.open(output.absolute().as_uri()):
            print(visible(f"no browser could be started; open {output} yourself"), file=sys.stderr)


def page_asked(args: Asked) -> Asked:
    """Return the arguments; with --open, set --format html and a file for the page.

    Raises:
        ConfigError: a page would be printed into a terminal, or --open is given with another format.
    """
    if args.open:
        if args.format not in (None, "terminal", "html"):
            raise ConfigError(f"--open requires --format html, got --format {args.format}; leave out one of them")
        import tempfile

        command = type(args).__module__.rpartition(".")[2].lstrip("_")
        output = args.output or Path(tempfile.mkdtemp(prefix="cs-systems-")) / f"{command}.html"
        args = replace(args, format="html", output=output)
    check_page(args.format, args.output)
    if args.format == "html":
        importlib.import_module("cs_systems.report.pages.tables")  # the import adds HTML to the formats of tables
    return args


def joined(
    texts: Sequence[str],
    format: str,
    title: str,
    pictures: Sequence[Picture] = (),
    records: Sequence[RunRecord] = (),
    others: Sequence[RunRecord] = (),
    answer: Answer | None = None,
    opening: str = "",
    output: Path | None = None,
) -> str:
    """Return the texts as one text: joined, or as the parts of a document (HTML with its title and pictures, JSON).

    A page or a JSON document has `answer`, or the diagnoses of the records, and the origin of the records and of
    `others`. `opening` is a sentence that comes first where a format has room for it, as wide as `output` is.
    """
    if format not in ("html", "json") and not opening:
        return "\n".join(texts)
    from cs_systems.analysis.diagnosis import NO_ANSWER, diagnose
    from cs_systems.report import diagnoses, origins

    if format not in ("html", "json"):
        first = diagnoses.text(NO_ANSWER, format, terminal_width(output), opening) if format in diagnoses.IN else ""
        return first + "\n".join(texts)
    origin = origins.lines([*records, *others])
    found = answer or diagnose(records)
    if format == "json":
        said = [document.note(opening)] if opening else []
        return "\n".join([document.answer(found), *said, *map(document.note, origin), *texts])
    from cs_systems.report.pages.tables import page

    return page(title, texts, pictures=pictures, answer=found, origin=origin, opening=opening)


def told_apart(a: Path, b: Path) -> tuple[str, str]:
    """Return the shortest ends of two paths that still differ: `base/records.jsonl` and `new/records.jsonl`."""
    parts = [path.absolute().parts for path in (a, b)]
    for count in range(1, max(map(len, parts)) + 1):
        ends = [str(Path(*of[-count:])) for of in parts]
        if ends[0] != ends[1]:
            return ends[0], ends[1]
    return a.name, b.name


def compared(a: Path, b: Path) -> str:
    """Return the title of a comparison of b with baseline a, from the ends of the paths that differ."""
    return " compared with ".join(reversed(told_apart(a, b)))


def pictures_of(records: Sequence[RunRecord], kind: str) -> list[Picture]:
    """Return the figure of this kind for a page, if the records can fill it."""
    from cs_systems.report.figures import plot
    from cs_systems.report.figures.kinds import KINDS

    return [(KINDS[kind].title, plot.svg(records, kind))] if kind in plot.kinds(records) else []


def deliver_tables(
    texts: Sequence[str], format: Format, output: Path | None, inputs: Sequence[Path] = (), opens: bool = False
) -> None:
    """Write the tables as `deliver` does, one after the other.

    A CSV file holds one table: the next ones go to FILE-2.csv, FILE-3.csv, and so on.
    """
    if output is None or format != "csv":
        deliver("\n".join(texts), format, output, opens)
        return
    for number, text in enumerate(texts, 1):
        file = output if number == 1 else output.with_stem(f"{output.stem}-{number}")
        check_outputs({"--output": file}, inputs)
        deliver(text, format, file)


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raise ConfigError for a file that must not or cannot be written, before anything is read or measured.

    Args:
        outputs: The file that each option names.
        inputs: Files that the command reads, and folders of runs, which keep their own files.
    """
    named = {option: file for option, file in outputs.items() if file is not None}
    inputs = tuple(inputs)
    seen: dict[str, Path] = {}
    for option, file in named.items():
        for read in inputs:
            if reason := _kept(file, read):
                raise ConfigError(f"{option} {file} {reason}; name another file")
        for other, same in seen.items():
            if files.is_same_file(file, same):
                raise ConfigError(f"{other} and {option} name the same file, {file}; give each a different file")
        seen[option] = file
        files.check_writable(file)


def figure_file(figure: Path | None) -> Path | None:
    """Return the file that --figure names. Raises ConfigError for an unsupported ending."""
    if figure is not None:
        from cs_systems.report.figures.plot import check_ending

        check_ending(figure)
    return figure


def check_page(format: str | None, output: Path | None) -> None:
    """Raise ConfigError for a page that would be printed into a terminal."""
    if format == "html" and output is None and sys.stdout.isatty():
        raise ConfigError("--format html would print a page into the terminal; add --output FILE.html, or use a pipe")


def reads(folder: Path | None) -> list[Path]:
    """Return the folder of a sweep as a list of input files; empty if the command line names no folder."""
    return [] if folder is None else [folder]


def sources_of(configs: Iterable[RunConfig]) -> list[Path]:
    """Return the Python files of the cells' own code."""
    names = {name for config in configs for name in config.sources}
    return [file for name in sorted(names) if (file := plugins.source_file(name))]


def _kept(file: Path, read: Path) -> str | None:
    """Return why the file must not be overwritten while the command reads `read`, or None if it may be."""
    from cs_systems.record import records_path

    # or the sidecar file of a snapshot
    if files.is_same_file(file, read) or files.is_same_file(file, Path(f"{read}.json")):
        return f"would overwrite the input {read}"
    records, real = records_path(read), Path(os.path.realpath(file))
    if files.is_same_file(file, records):
        return f"would overwrite the records of {read}"
    if not (read.is_dir() or read.suffix in ("", ".jsonl")) or not files.is_same_file(real.parent, records.parent):
        return None
    if any(fnmatch(real.name, pattern) for pattern in RUN_FILES):
        return f"has a name reserved for files of the run {read}"
    is_artifact = real.is_file() and records.is_file() and json.dumps(real.name).encode() in records.read_bytes()
    return f"would overwrite a file that the records of the run {read} refer to" if is_artifact else None
