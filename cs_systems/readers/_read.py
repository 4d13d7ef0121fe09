"""Reader of a trace of any kind: the file's content decides, not its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cs_systems.config import ConfigError
from cs_systems.core.file_types import GZIP_MAGIC, ROCPROF, SQLITE_MAGIC, refuse_other
from cs_systems.core.file_types import head as unpacked_head
from cs_systems.core.range_names import TRACE_SUFFIXES
from cs_systems.readers import _kineto as kineto
from cs_systems.readers import _nsys as nsys
from cs_systems.readers import _rocpd as rocpd
from cs_systems.readers import _rocprof as rocprof
from cs_systems.readers._folder import choice
from cs_systems.readers.forms.modules import read_beside
from cs_systems.readers.forms.trace import Trace


def read(path: Path, process: int | None = None) -> Trace:
    """Return the trace that nsys (.sqlite, .nsys-rep), torch.profiler or rocprofv3 (.json, .json.gz, .db) wrote.

    Args:
        path: The trace.
        process: The pid of the process to read; required where the trace holds several.

    Raises:
        ConfigError: The file is not a usable trace; the message says what is missing and how to record it.
    """
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.name.endswith(TRACE_SUFFIXES))
        if not inside:
            refuse_other(path, "analyze")
        given = choice(path, inside) if inside else "a trace file"
        raise ConfigError(f"{path} is a folder; give {given}")
    if not path.is_file():
        raise ConfigError(f"{path} {'is not a plain file' if path.exists() else 'does not exist'}; give a trace file")
    refuse_other(path, "analyze")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ConfigError(f"{path} is empty: the trace was never written; check the disk space and record again")
    if head.startswith(SQLITE_MAGIC):
        if rocpd.is_database(path):
            return rocpd.read(path, process)
        return replace(nsys.read(path, process), modules=read_beside(path))
    if path.suffix in nsys.REPORTS:
        with nsys.exported(path) as database:
            try:
                trace = nsys.read(database, process)
            except ConfigError as error:  # the export is gone when the message is read
                raise ConfigError(str(error).replace(str(database), str(path))) from None
            return replace(trace, source=str(path), modules=read_beside(path))
    if ROCPROF.match(unpacked_head(path)):
        return rocprof.read(path, process)
    if head.startswith(GZIP_MAGIC) or head.lstrip()[:1] in (b"{", b"["):
        return kineto.read(path, process)
    if path.suffix == ".ncu-rep":
        raise ConfigError(f"{path} is a report of ncu, which has no timeline; read it with cs_systems.readers.ncu.read")
    raise ConfigError(
        f"{path} is not a trace; give an SQLite export or .nsys-rep of nsys, a Chrome trace (.json, .json.gz) of "
        "torch.profiler, a .json or .db of rocprofv3, or a .ncu-rep of ncu"
    )
