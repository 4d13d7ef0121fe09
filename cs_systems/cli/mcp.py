"""Serve traces, snapshots and runs to an agent by the Model Context Protocol, over standard input and output.

The server reads files below the folders it is given, and no others. It measures nothing, and writes only the cache of
parsed traces. Its tools return the documents of --format json. It needs the package mcp: pip install 'cs-systems[mcp]'.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, TypedDict

from tyro.conf import Positional, arg

from cs_systems.cli._options import Paths
from cs_systems.config import ConfigError
from cs_systems.core.tables import Column, Table

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTALL = "pip install 'cs-systems[mcp]'"
SCHEMA, CALLS = "cs-systems://schema", "cs-systems://calls"
ABOUT = (
    "Tools return JSON documents. The short answer has the causes of lost time or memory, and names further tables in "
    f"`more`; ask for them by `tables`. Units and meanings of all columns: tool schema, or resource {SCHEMA}."
)


@dataclass(frozen=True)
class Mcp:
    roots: Annotated[
        Positional[Paths],
        arg(metavar="FOLDER [FOLDER ...]", help="folders that may be read", help_behavior_hint="(default: this one)"),
    ] = (Path(),)


ARGS = Mcp


class RunRow(TypedDict):
    """Folder with records."""

    run: Annotated[str, Column("folder", "folder of the run")]
    records: Annotated[int, Column("records", "number of records in the folder")]


RUNS = Table("runs", RunRow, "folders of runs, with the number of their records")


def run(args: Mcp) -> int:
    """Serve until standard input ends; return exit status 0. Raises ConfigError without the package or a folder."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"cs-systems mcp requires the package mcp; {INSTALL}")
    for root in args.roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is not a folder; give folders that may be read")
    server(args.roots).run("stdio")
    return 0


def server(roots: Sequence[Path]) -> MCPServer:
    """Return the server of these folders."""
    from mcp.server.mcpserver import MCPServer

    from cs_systems.cli.schema import DOCUMENT, schema
    from cs_systems.core.version import __version__
    from cs_systems.report.tables import document

    made = MCPServer("cs-systems", instructions=ABOUT, version=__version__, log_level="ERROR")
    reader = Reader([root.resolve() for root in roots])

    def tool(function: Callable[..., str]) -> None:
        made.tool(function.__name__.rstrip("_"), structured_output=False)(function)

    @tool
    def analyze(paths: list[str], tables: list[str] | None = None, top: int | None = None, all: bool = False) -> str:
        """Analyze a trace, compare two, or merge the traces of all ranks of a job."""
        return reader.command("analyze", paths, tables, top, all)

    @tool
    def snapshot(paths: list[str], tables: list[str] | None = None, top: int | None = None, all: bool = False) -> str:
        """Analyze a CUDA memory snapshot of PyTorch, or compare two."""
        return reader.command("snapshot", paths, tables, top, all)

    @tool
    def report(path: str, tables: list[str] | None = None) -> str:
        """Show the records of a run. Table `cells` has every column; others are results of the cells."""
        return reader.command("report", [path], tables)

    @tool
    def compare(baseline: str, candidate: str, all: bool = False) -> str:
        """Compare two runs: ratio of the times with its interval, and a verdict for each cell."""
        return reader.command("compare", [baseline, candidate], all=all)

    @tool
    def runs(path: str | None = None) -> str:
        """List the folders with records below a folder, by default below all that may be read."""
        return reader.counted(lambda: document.document(document.table(RUNS, reader.runs(path))))

    @tool
    def schema_(name: str = DOCUMENT) -> str:
        """Return the JSON Schema of the documents, of a record, or of one table: types, units and meanings."""
        return reader.counted(lambda: document.written(schema(name)))

    @made.resource(SCHEMA, mime_type="application/schema+json")
    def published() -> str:
        """JSON Schema of the documents that the tools return."""
        return document.written(schema(DOCUMENT))

    @made.resource(CALLS)
    def calls() -> str:
        """Number of calls of tools so far."""
        return str(reader.calls)

    return made


class Reader:
    """Reader of the files below some folders, one command at a time; counts the calls."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots, self._lock, self.calls = roots, Lock(), 0

    def counted(self, answer: Callable[[], str]) -> str:
        """Return the answer, or the document of its error."""
        from cs_systems.cli import EXIT_MALFORMED, failed_file
        from cs_systems.report.tables.document import error

        with self._lock:
            self.calls += 1
            try:
                return answer()
            except OSError as problem:
                return error(failed_file(problem), EXIT_MALFORMED)
            except (RuntimeError, ValueError) as problem:
                return error(str(problem), EXIT_MALFORMED)

    def command(
        self,
        name: str,
        paths: Sequence[str],
        tables: Sequence[str] | None = None,
        top: int | None = None,
        all: bool = False,
    ) -> str:
        """Return what a command writes with --format json."""
        return self.counted(lambda: self._command(name, paths, tables or (), top, all))

    def runs(self, path: str | None) -> list[RunRow]:
        """Return the folders with records below a path.

        Raises ConfigError for a path that is not a folder, or is outside of the roots.
        """
        from cs_systems.record import RECORDS_FILE

        roots = self._roots if path is None else [self._inside(path)]
        if path is not None and not roots[0].is_dir():
            raise ConfigError(f"{path} is not a folder; {self._allowed()}")
        found = dict[str, RunRow]()  # by folder, because the roots may overlap
        for root in roots:
            for file in sorted(root.rglob(RECORDS_FILE)):
                if self._is_inside(file.resolve()):
                    folder = os.path.relpath(file.parent)
                    records = sum(bool(line.strip()) for line in file.read_bytes().split(b"\n"))
                    found[folder] = {"run": folder, "records": records}
        return [*found.values()]

    def _command(self, name: str, paths: Sequence[str], tables: Sequence[str], top: int | None, all: bool) -> str:
        from cs_systems.cli import main

        if wrong := next((table for table in tables if not table.isidentifier()), None):
            raise ConfigError(f"unknown table {wrong!r}; give names of tables, such as kernels")
        words = [name, *(_as_argument(self._inside(path)) for path in paths), "--format", "json"]
        words += ["--table", *tables] if tables else []
        words += [f"--top={top}"] if top is not None else []
        words += ["--all"] if all else []
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            main(words)
        return out.getvalue()

    def _inside(self, path: str) -> Path:
        """Return the file or folder. Raises ConfigError if it, or a link in it, leads outside of the roots."""
        if "\0" in path:
            raise ConfigError(f"path {path!r} contains a NUL character; remove it")
        real = Path(path).resolve()
        if not self._is_inside(real):
            raise ConfigError(f"{path} is outside of the folders that may be read; {self._allowed()}")
        for each in _links(real):
            if not self._is_inside(each.resolve()):
                raise ConfigError(f"{each} leads outside of the folders that may be read; {self._allowed()}")
        return real

    def _is_inside(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._roots)

    def _allowed(self) -> str:
        return f"give a path below {' or '.join(map(str, self._roots))}"


def _as_argument(path: Path) -> str:
    """Return a short name of the path that no command takes for an option."""
    name = os.path.relpath(path)
    return f"./{name}" if name.startswith("-") else name


def _links(path: Path) -> Iterator[Path]:
    """Yield the symbolic links below a folder, or next to a file that is read with it."""
    from cs_systems.readers.forms.modules import modules_file

    if path.is_file() and (beside := modules_file(path)).is_symlink():
        yield beside
    for base, folders, files in os.walk(path):
        yield from (each for name in (*folders, *files) if (each := Path(base, name)).is_symlink())
