"""Which command reads a file: told by what is in it, so that one that is given another's can name that. Floor 0."""

from __future__ import annotations

import re
import shlex
import zlib
from pathlib import Path

from cs_systems.checks import ConfigError

SQLITE_MAGIC, GZIP_MAGIC, PICKLE_MAGIC = b"SQLite format 3\0", b"\x1f\x8b", b"\x80"
HEAD_BYTES = 1 << 16
HOLDS = {  # command → what its files hold
    "report": "records of runs",
    "analyze": "what a profiler recorded",
    "snapshot": "a pickle, as memory snapshots are",
}


def head(path: Path) -> bytes:
    """How a file begins, unpacked where it is gzipped; what a truncated or damaged one still gives."""
    with path.open("rb") as file:
        raw = file.read(HEAD_BYTES)
    if not raw.startswith(GZIP_MAGIC):
        return raw
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, HEAD_BYTES)  # 31: with gzip's header
    except zlib.error:
        return b""


def command_for(path: Path) -> str | None:
    """The one of HOLDS that reads this file or folder; None where nothing tells."""
    if path.is_dir():
        return "report" if (path / "records.jsonl").is_file() else None
    if not path.is_file():
        return None
    begins = head(path)
    if begins.startswith(SQLITE_MAGIC) or b'"traceEvents"' in begins or path.suffix in (".nsys-rep", ".ncu-rep"):
        return "analyze"
    if begins.startswith(PICKLE_MAGIC):
        return "snapshot"
    return "report" if re.match(rb'\{"key":"\w*","config":', begins) else None


def refuse_other(path: Path, command: str) -> None:
    """Raise ConfigError where the file is another command's."""
    if (found := command_for(path) or command) != command:
        raise ConfigError(f"{path} holds {HOLDS[found]}: read it with cs-systems {found} {shlex.quote(str(path))}")
