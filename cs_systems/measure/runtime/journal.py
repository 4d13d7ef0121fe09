"""Journal of a sweep: the folder of its records, written by one sweep at a time and safe against kills.

Records are appended and forced to disk one by one, and existing records are never changed. The folder also has the lock
that a sweep holds and, in a job that torchrun started, the name of the cell that is being measured.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cs_systems.config import ConfigError, RunConfig
from cs_systems.record import DONE, OtherSchema, RunRecord, append_record, readable_records, records_path

_PROBE_BYTES = 1 << 20
ANOTHER = "choose another out"  # the command line writes --out
AFRESH = f"{ANOTHER}, or start over with fresh"


class FolderRefused(ConfigError):
    """Error for a folder that cannot take a sweep's records; the remedy names arguments, or the command's options."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self._problem, self._remedy = problem, remedy

    def with_options(self) -> str:
        return f"{self._problem}; {ConfigError(self._remedy, 'out', 'fresh').with_options()}"


class FolderUnwritable(OSError, FolderRefused):
    """Error for a folder that cannot be written."""

    def __init__(self, problem: str, remedy: str) -> None:
        FolderRefused.__init__(self, problem, remedy)  # OSError's would take two texts for errno and strerror


class Journal:
    """Records of one folder.

    Raises OSError if the folder cannot be written. Raises ConfigError if another sweep writes to it, if its records
    file holds something else, or if a file with a name that the journal uses is not a regular file.
    """

    def __init__(self, folder: Path, *, can_start_over: bool = False, record_host: bool = False) -> None:
        self.folder, self._record_host = folder, record_host
        self.remedy_for_other_records = AFRESH if can_start_over else ANOTHER

    @property
    def log(self) -> Path:
        """Log file of the workers' output."""
        return self.folder / "worker.log"

    @property
    def _running(self) -> Path:
        return self.folder / ".running"

    @classmethod
    def prepare(cls, out: str | os.PathLike[str], *, fresh: bool | None = None, record_host: bool = False) -> Journal:
        """Create the folder and check that it is writable, before a long sweep with records that could not be saved.

        fresh: rename its existing records; None for a caller without this option, so that no error names it.
        record_host: write this host's name into new records.
        """
        folder = Path(out)
        if folder.is_file():
            raise FolderUnwritable(f"cannot write to {folder}: it is a file", f"{ANOTHER}, a folder of records")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder) as probe:
                probe.write(b"\0" * _PROBE_BYTES)
                probe.flush()
                os.fsync(probe.fileno())
            journal = cls(folder, can_start_over=fresh is not None, record_host=record_host)
            file = records_path(folder)
            for own in (file, journal.log, journal._running):
                if own.exists():
                    _open_plain(own, os.O_RDWR | os.O_APPEND).close()
        except OSError as error:
            raise FolderUnwritable(f"cannot write to {folder}: {error.strerror or error}", ANOTHER) from error
        if fresh and file.exists():
            with journal.locked():
                file.rename(_aside(file))
        journal.refuse_foreign_lines()
        return journal

    @classmethod
    def check(cls, out: str | os.PathLike[str]) -> list[str]:
        """Raise the errors of `prepare`, but leave no new folder, because a signal may end the program before a record.

        Returns: the folders that do not exist, each below the next one.
        """
        folder = Path(out).absolute()
        new = [str(each) for each in (folder, *folder.parents) if not each.exists()]
        try:
            cls.prepare(out)
        finally:
            remove_empty(new)
        return new

    def refuse_foreign_lines(self) -> None:
        """Raise ConfigError if the file holds objects that are not records, which the final table could not read.

        Incomplete lines of an interrupted write are not objects, and are skipped.
        """
        file = records_path(self.folder)
        if not file.exists():
            return
        try:
            readable_records(file, strict=True)
        except ConfigError as error:
            if isinstance(error.__cause__, OtherSchema):
                raise
            raise FolderRefused(str(error).partition("; ")[0], self.remedy_for_other_records) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this sweep, because two sweeps at once would disturb each other's measurements."""
        try:
            lock = _open_plain(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FolderRefused(f"{self.folder / '.lock'} is a link", f"remove it, or {ANOTHER}") from None
            raise
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderRefused(
                    f"another sweep is writing to {self.folder}", f"wait for it, or {ANOTHER}"
                ) from None
            yield

    def read(self) -> tuple[list[RunRecord], list[str]]:
        """Return the readable records, and a warning for each unreadable line.

        Raises ConfigError for a record of another schema, which must not be mixed with this version's.
        """
        file = records_path(self.folder)
        return readable_records(file) if file.exists() else ([], [])

    def times_done(self, config: RunConfig) -> int:
        """Return the number of earlier measurements of this cell in this folder."""
        return len(self.done(config))

    def done(self, config: RunConfig) -> list[RunRecord]:
        """Return the records of earlier measurements of this cell in this folder."""
        return [r for r in self.read()[0] if r.status in DONE and r.run_config.key() == config.key()]

    def stamped(self, record: RunRecord) -> RunRecord:
        """Return the record with its origin: date, command, and the host on request."""
        return record.stamped(record_host=self._record_host)

    def append(self, record: RunRecord) -> RunRecord:
        """Append the record with its origin, and return it."""
        record = self.stamped(record)
        append_record(self.folder, record)
        return record

    def mark_running(self, config: RunConfig, repeat: int) -> None:
        """Write the name of the cell that is being measured to a file, in case the process is killed."""
        with _open_plain(self._running, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as marker:
            marker.write(f"{config.key()} {repeat}".encode())

    def unmark_running(self) -> None:
        self._running.unlink(missing_ok=True)

    def found_running(self, configs: Sequence[RunConfig]) -> tuple[RunConfig, int] | None:
        """Return the cell and the repeat in which an earlier job was killed; None if there is none."""
        try:
            key, repeat = self._running.read_text().split()
            return next((config, int(repeat)) for config in configs if config.key() == key)
        except (FileNotFoundError, ValueError, StopIteration):  # or it was killed before any cell began
            return None


def remove_empty(folders: Sequence[str]) -> None:
    """Remove the folders that are empty; each contains the one before it."""
    with suppress(OSError):
        for folder in folders:
            Path(folder).rmdir()


def _open_plain(path: Path, flags: int) -> IO[bytes]:
    """Open a regular file without waiting for the other end of a FIFO. Raises OSError for anything else."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FolderRefused(f"{path} is not a regular file", f"remove it, or {ANOTHER}")
    return os.fdopen(descriptor, "rb+" if flags & os.O_RDWR else "wb")


def _aside(file: Path) -> Path:
    """Return an unused name for old records, with a number if --fresh is given twice within a second."""
    until = f"records-until-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([until], (f"{until}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := file.with_name(f"{name}.jsonl")).exists())
