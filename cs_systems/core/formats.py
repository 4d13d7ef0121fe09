"""File formats: each is the constant FORMAT of a module in `readers/`, and recognises files by their content.

A command that gets a file for another command can then name the right command.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import re
import shlex
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError

SQLITE_MAGIC, GZIP_MAGIC, BYTE_ORDER_MARK = b"SQLite format 3\0", b"\x1f\x8b", b"\xef\xbb\xbf"
# From protocol 2 on, a pickle begins with its protocol; an older one begins with a list, a dictionary or a global.
PICKLE = re.compile(rb"\x80(?![^\x02-\x09])|[(\]}][dlciPpqrtSVIKX(.\]}]|c[\w.]+\n[\w.]+\n")
HEAD_BYTES = 1 << 16
# A trace or a snapshot compresses 10 to 50 times; repeated bytes, as in a decompression bomb, 1,000 times.
MOST_EXPANSION, EXPANSION_FROM = 100, 1 << 24
TIMELINE = "timeline"


@dataclass(frozen=True, kw_only=True)
class Format:
    """File format: how to recognise, read and record such a file.

    `title` and `instead` are parts of messages: "FILE is {title}; {instead}". A format without `read` is only
    recognised, so that an error can name it.
    """

    title: str
    matches: Callable[[bytes, Path], object]  # the first bytes, decompressed, and the path
    is_general: bool = False  # a more specific format that also matches takes precedence: many tools write SQLite files
    suffixes: tuple[str, ...] = ()
    command: str = "analyze"  # name of the command that reads such files
    holds: str = TIMELINE  # or "counters", "scopes" …: decides how `command` shows the file
    read: Callable[..., Any] | None = None  # for a timeline `(path, process) -> Trace`
    job: Callable[[Path], Any] | None = None  # `(path) -> Job`, without reading the events
    # returns the pids with kernels; only for formats that can hold several ranks
    processes: Callable[[Path], list[int]] | None = None
    record: str = ""  # instructions to record such a file, in Markdown
    lacks: str = ""
    instead: str = ""  # remedy for a file that cannot be read
    name: str = ""  # name of the module that declares it, set by `formats`


@functools.cache
def formats() -> tuple[Format, ...]:
    """Return all formats, the more general ones last."""
    refused = importlib.import_module("cs_systems.readers._refused").REFUSED
    known = (replace(plugins.get("readers", name), name=name) for name in plugins.names("readers"))
    return tuple(sorted((*refused, *known), key=lambda one: one.is_general))


def suffixes(holds: str | None = None) -> tuple[str, ...]:
    """Return the file-name suffixes of the formats with this content, or of all formats."""
    return tuple(dict.fromkeys(end for one in formats() if holds in (None, one.holds) for end in one.suffixes))


def offered(command: str) -> list[str]:
    """Return the formats that a command reads, for a help text or message, such as `a report of ncu (.ncu-rep)`."""
    known = sorted((one for one in formats() if one.read and one.command == command), key=lambda one: one.name)
    return [f"{one.title} ({', '.join(one.suffixes)})" for one in known]


def recognised(path: Path) -> Format | None:
    """Return the format of a file or folder by its content, None if it is unknown."""
    if not path.exists():
        return None
    begins = head(path) if path.is_file() else b""
    return next((one for one in formats() if one.matches(begins, path)), None)


def named(path: Path) -> Format | None:
    """Return the format that a file's name suggests, for a file that is not recognised by its content."""
    return next((one for one in reversed(formats()) if one.read and path.name.endswith(one.suffixes)), None)


def command_for(path: Path) -> str | None:
    """Return the command that reads this file or folder; None if it is not recognised by its content."""
    found = recognised(path)
    return found.command if found and found.read else None


def refuse_other(path: Path, command: str) -> Format | None:
    """Return the format of a file or folder, None if it is unknown.

    Raises:
        ConfigError: Another command reads this format, or none does.
    """
    found = recognised(path)
    if found and not found.read:
        raise ConfigError(f"{path} is {found.title}; {found.instead}")
    if found and found.command != command:
        command_line = f"cs-systems {found.command} {shlex.quote(str(path))}"
        raise ConfigError(f"{path} contains {found.title}; read it with {command_line}")
    return found


def begins(pattern: bytes) -> Callable[[bytes, Path], bool]:
    """Return a test whether a file begins with a match of the regular expression."""
    return lambda head, path: re.match(pattern, head, re.DOTALL) is not None  # compiled only when a file is read


def imported(module: str, name: str = "read") -> Callable[..., Any]:
    """Return a function of another module, imported only when called, so that help texts need no numpy."""
    return lambda *args: getattr(importlib.import_module(module), name)(*args)


def head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed if it is gzipped, without a byte-order mark.

    For a truncated or damaged gzip file, return as much as can be decompressed.
    """
    with path.open("rb") as file:
        raw = file.read(HEAD_BYTES)
    if raw.startswith(GZIP_MAGIC):
        try:
            raw = zlib.decompressobj(wbits=31).decompress(raw, HEAD_BYTES)  # 31: with gzip's header
        except zlib.error:
            return b""
    return raw.removeprefix(BYTE_ORDER_MARK)


class Unpacked:
    """Reader of a file's bytes that decompresses gzip up to a limit and drops a byte-order mark.

    `count` is the number of bytes read so far; `share` is the fraction of the file read so far. `read` raises
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
        if not self.count and data.startswith(BYTE_ORDER_MARK):
            self.count = len(BYTE_ORDER_MARK)
            data = data[self.count :] or self._unpacked.read(size)
        self.count += len(data)
        if self.count > max(EXPANSION_FROM, MOST_EXPANSION * self._file.tell()):
            raise ConfigError(
                f"{self._path} decompresses to over {MOST_EXPANSION} times its size, unlike any trace or snapshot; "
                "if you trust it, gunzip it and give the result"
            )
        return data

    def close(self) -> None:
        self._file.close()
