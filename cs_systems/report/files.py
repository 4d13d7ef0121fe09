"""Atomic writing of output files: a failed write leaves the old file unchanged."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cs_systems.config import ConfigError

ELSEWHERE = "choose a file in a folder with write permission"
SHORTER = "choose a shorter name"
NO_FOLDER = "correct the folder in the path"
FREE_SPACE = "free some space, then run the same command again"
REMEDIES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: NO_FOLDER,
    errno.EEXIST: NO_FOLDER,
    errno.ENAMETOOLONG: SHORTER,
    errno.ENXIO: "start the program that reads the FIFO first",
}
# links in these folders lead to open descriptors, which must keep their file position
STREAMS = (Path("/dev"), Path("/dev/fd"))


def write_file(file: Path, content: bytes) -> None:
    """Replace the file's content, and keep the old content if that fails.

    Missing folders are created. A device and a FIFO receive the content directly.
    Raises ConfigError if the file cannot be written.
    """
    with writing(file) as stream:
        stream.write(content)


@contextmanager
def writing(file: Path) -> Iterator[IO[bytes]]:
    """Yield a stream for the file's new content, as `write_file` does for content that is written in parts."""
    with _named(file):
        if _is_stream(file):
            with os.fdopen(_opened(file), "wb") as stream:
                yield stream
            return
        with _beside(file) as (target, made):
            with made.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            made.replace(target)


def check_writable(file: Path) -> None:
    """Raise ConfigError for a file that `write_file` could not write, before a long run produces its content."""
    with _named(file):
        if not _is_stream(file):
            with _beside(file):
                pass


@contextmanager
def standard_output() -> Iterator[None]:
    """Add the name of standard output to an OSError from writing to it, because the system does not name it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise


def is_same_file(a: Path, b: Path) -> bool:
    """Return True if both paths lead to one file, links included; the file need not exist yet."""
    with suppress(OSError, ValueError):
        if a.samefile(b):
            return True
    return os.path.realpath(a) == os.path.realpath(b)


def _is_stream(file: Path) -> bool:
    """Return whether the file is a device or FIFO. Raises OSError for a folder, a disk or a socket."""
    try:
        kind = file.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISBLK(kind) or stat.S_ISSOCK(kind):
        raise OSError(errno.EINVAL, f"it is a {'block device' if stat.S_ISBLK(kind) else 'socket'}")
    return not stat.S_ISREG(kind) or file.absolute().parent in STREAMS


def _opened(file: Path) -> int:
    """Open a device or FIFO. Raises ENXIO for a FIFO without a reader, which opening would wait for."""
    descriptor = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def _beside(file: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the file that links lead to, and a new empty file in its folder, which is removed afterwards."""
    target = Path(os.path.realpath(file))
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o666
    if target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
        target.open("ab").close()  # fails for a read-only file, which must not be replaced
    made = target.with_name(f".{os.getpid()}.part")
    made.unlink(missing_ok=True)
    os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if mode != 0o666:
            made.chmod(mode)
        yield target, made
    finally:
        made.unlink(missing_ok=True)


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Convert a system error into a ConfigError that names the file and the remedy."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        message = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        place = getattr(error, "filename", None)
        reason = (
            f"{message} ({place})"
            if place and str(place) != str(file) and not str(place).endswith(".part")
            else message
        )
        remedy = REMEDIES.get(getattr(error, "errno", None) or 0, ELSEWHERE)
        raise ConfigError(f"cannot write {file}: {reason}; {remedy}") from error
