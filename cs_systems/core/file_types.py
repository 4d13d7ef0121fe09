"""Detection of the command that reads a file, by the file's content.

A command given another command's file can then name the right one.
"""

from __future__ import annotations

import gzip
import re
import shlex
import zlib
from pathlib import Path
from typing import Any

from cs_systems.core.validation import ConfigError

SQLITE_MAGIC, GZIP_MAGIC = b"SQLite format 3\0", b"\x1f\x8b"
# From protocol 2 on, a pickle begins with its protocol; an older one begins with a list, a dictionary or a global.
PICKLE = re.compile(rb"\x80(?![^\x02-\x09])|[(\]}][dlciPpqrtSVIKX(.\]}]|c[\w.]+\n[\w.]+\n")
# Profile of Triton's Proton: a tree of scopes, or Chrome traces whose kernels name their scopes.
SCOPES = re.compile(rb'\s*\[\s*\{\s*"(children|frame|metrics)"\s*:')
SCOPES_TRACE = re.compile(rb'\s*\{\s*"displayTimeUnit"\s*:\s*"us"\s*,\s*"traceEvents"\s*:.*"call_stack"', re.DOTALL)
ROCPROF = re.compile(rb'\s*\{\s*"rocprofiler-sdk-tool"')  # JSON of AMD's rocprofv3
_SQLITE_INSTEAD = "which cs-systems cannot read; export the report again with nsys export -t sqlite"
_ROCPROF_INSTEAD = "which cs-systems cannot read; record again with rocprofv3 --runtime-trace --output-format json"
_PERFETTO_INSTEAD = (
    "which cs-systems cannot read; record again as JSON, such as with rocprofv3 --runtime-trace --output-format json"
)
# Files that no command reads, by how they begin → what they are, and what to give instead.
UNREAD = (
    (
        re.compile(rb'\{"data":\["|data: "|\x89HDF\r\n|PAR1|ARROW1|\xff{4}.{,99}table_name', re.DOTALL),
        f"an export of nsys in another format than SQLite, {_SQLITE_INSTEAD}",
    ),
    (
        re.compile(rb'"?(Kind"?,"?(Agent_Id|Operation)|Domain"?,"?Function|Index"?,"?KernelName)\b'),
        f"a table of rocprof in CSV, {_ROCPROF_INSTEAD}",
    ),
    (
        re.compile(rb'\s*\{\s*"traceEvents"\s*:\s*\[\s*\{\s*\}'),
        f"a trace of rocprof before version 3, {_ROCPROF_INSTEAD}",
    ),
    (
        re.compile(rb'\s*\{\s*"\$schema"\s*:\s*"https://www\.speedscope'),
        "a profile of the CPU's stacks for speedscope, which holds no kernels; give a trace of torch.profiler",
    ),
    (
        re.compile(rb'\s*\{[^\[{]*"schema"\s*:\s*"[\d.]+'),
        "an execution trace of PyTorch, which has no times; give the trace that torch.profiler's export_chrome_trace "
        "wrote",
    ),
    (
        re.compile(rb"\s*\[\s*\[|<html>\s*<head>.{,99}<title>GPU Memory Timeline", re.DOTALL),
        "a memory timeline of export_memory_timeline, which cs-systems cannot read; call "
        "torch.cuda.memory._record_memory_history() before and torch.cuda.memory._dump_snapshot(FILE) after the steps, "
        "and give FILE to cs-systems snapshot",
    ),
    (
        re.compile(rb"[ -:<-z|~]+;[ -z|~]* \d+\n"),
        "a list of stacks of export_stacks, which has no single kernels; give the trace that export_chrome_trace wrote",
    ),
)
PERFETTO = (".pftrace", ".perfetto-trace")  # names of Perfetto's traces, whose content does not decide
HEAD_BYTES = 1 << 16
# A trace or a snapshot compresses 10 to 50 times; repeated bytes, as in a decompression bomb, 1,000 times.
MOST_EXPANSION, EXPANSION_FROM = 100, 1 << 24
ANALYZED = (".nsys-rep", ".qdrep", ".ncu-rep", ".hatchet")  # names of traces whose content does not decide
HOLDS = {  # command → content of its files
    "report": "records of runs",
    "analyze": "a profiler's trace",
    "snapshot": "a pickle, the format of memory snapshots",
}


def head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed if it is gzipped.

    Of a truncated or damaged gzip file, return as much as can be decompressed.
    """
    with path.open("rb") as file:
        raw = file.read(HEAD_BYTES)
    if not raw.startswith(GZIP_MAGIC):
        return raw
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, HEAD_BYTES)  # 31: with gzip's header
    except zlib.error:
        return b""


class Unpacked:
    """Reader of a file's bytes, decompressed if it is gzipped, that limits the expansion.

    `count` is the number of bytes read so far; `share` is the fraction of the file that they are. `read` raises
    ConfigError when the decompressed bytes far exceed the size of the file.
    """

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._size = max(1, path.stat().st_size)
        zipped = self._file.read(2) == GZIP_MAGIC
        self._file.seek(0)
        self._unpacked: Any = gzip.GzipFile(fileobj=self._file) if zipped else self._file

    @property
    def share(self) -> float:
        return self._file.tell() / self._size

    def read(self, size: int) -> bytes:
        data: bytes = self._unpacked.read(size)
        self.count += len(data)
        if self.count > max(EXPANSION_FROM, MOST_EXPANSION * self._file.tell()):
            raise ConfigError(
                f"{self._path} decompresses to over {MOST_EXPANSION} times its size, unlike any trace or snapshot; "
                "if you trust it, gunzip it and give the result"
            )
        return data

    def close(self) -> None:
        self._file.close()


def command_for(path: Path) -> str | None:
    """Return the command of HOLDS that reads this file or folder; None if the content does not decide."""
    if path.is_dir():
        return "report" if (path / "records.jsonl").is_file() else None
    if not path.is_file():
        return None
    begins = head(path)
    if begins.startswith(SQLITE_MAGIC) or b'"traceEvents"' in begins or path.suffix in ANALYZED:
        return "analyze"
    if SCOPES.match(begins) or ROCPROF.match(begins):
        return "analyze"
    if PICKLE.match(begins):
        return "snapshot"
    return "report" if re.match(rb'\{"key":"\w*","config":', begins) else None


def refuse_other(path: Path, command: str) -> None:
    """Raise ConfigError if the file belongs to another command, or to none."""
    begins = head(path) if path.is_file() else b""
    for pattern, what in UNREAD:
        if pattern.match(begins):
            raise ConfigError(f"{path} is {what}")
    if path.suffix in PERFETTO:
        raise ConfigError(f"{path} is a trace in Perfetto's own format, {_PERFETTO_INSTEAD}")
    if path.is_dir() and next(path.glob("*.parquet"), None):
        raise ConfigError(
            f"{path} holds Parquet files, which cs-systems cannot read; if nsys wrote them, export the report again "
            "with nsys export -t sqlite"
        )
    if (found := command_for(path) or command) != command:
        raise ConfigError(f"{path} contains {HOLDS[found]}; read it with cs-systems {found} {shlex.quote(str(path))}")
