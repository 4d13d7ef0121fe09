"""Plain data from a pickle that comes from outside: `load(path, how) -> data`. Floor 0.

The unpickler refuses every global, so that nothing in the file can run, and gets no more memory than there is.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from cs_systems.analysis.folder import choice
from cs_systems.config import ConfigError
from cs_systems.filekind import GZIP_MAGIC, PICKLE_MAGIC, head, refuse_other

MEMORY_PER_FILE_BYTE = 8  # bytes of Python objects that a byte of a pickled snapshot becomes


class _Refusing(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples and dictionaries, and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        what = f"{module}.{name}"[:80]
        raise _Refused(what if what.isprintable() else ascii(what))

    def persistent_load(self, id: Any) -> NoReturn:
        raise _Refused(f"a persistent id ({str(id)[:80]!r})")


class _Refused(Exception):
    """What the pickle asked for."""


def load(path: Path, how: str) -> Any:
    """What is pickled in a file, gzipped or not. `how` such a file is written, for messages.

    Raises ConfigError, which says what is wrong and what to do about it.
    """
    if not path.is_file():
        inside = sorted(path.glob("*.pickle")) if path.is_dir() else []
        give = choice(path, inside) if inside else "the file of a snapshot"
        raise ConfigError(f"{path} is {'a folder' if path.is_dir() else 'not there'}: give {give}")
    if not path.stat().st_size:
        raise ConfigError(f"{path} is empty: the snapshot was not written; was there room on the disk?")
    refuse_other(path, "snapshot")
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    if not head(path).startswith(PICKLE_MAGIC):
        raise ConfigError(f"{path} is not a pickle: write a memory snapshot with {how}")
    _refuse_beyond_memory(path)
    try:
        with gzip.open(path) if zipped else path.open("rb") as file, _within_memory():
            return _Refusing(file).load()
    except _Refused as refused:
        raise ConfigError(
            f"{path} was refused: it asks for {refused}, as a pickle that runs code does. A memory snapshot holds "
            "numbers, texts, lists and dictionaries alone; nothing of it was run"
        ) from None
    except (EOFError, MemoryError) as error:
        why = "is cut off" if isinstance(error, EOFError) else "does not fit into this machine's memory"
        raise ConfigError(f"{path} {why}: dump it again, with fewer events (max_entries) if room is short") from None
    except Exception as error:  # a malformed pickle may raise anything
        cut = "is cut off" if "truncated" in str(error) else f"is a damaged pickle ({str(error)[:200]!a})"
        raise ConfigError(f"{path} {cut}: dump it again, with fewer events (max_entries) if room is short") from None


def _refuse_beyond_memory(path: Path) -> None:
    """An unpickled snapshot is several times its file: better no answer than a machine that swaps."""
    size = path.stat().st_size
    needed, available = size * MEMORY_PER_FILE_BYTE, _available_bytes()
    if available is not None and needed > max(available, 2**30):
        raise ConfigError(
            f"{path} is {size / 2**30:.1f} GiB and would need about {needed / 2**30:.0f} GiB of memory, "
            f"of which {available / 2**30:.0f} GiB are free: record fewer events (max_entries), or read it on a "
            "machine with more memory"
        )


def _available_bytes() -> int | None:
    """What Linux says can be had without swapping, None elsewhere."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


@contextmanager
def _within_memory() -> Iterator[None]:
    """A pickle can ask for any amount of memory: what is more than there is becomes a MemoryError. On Linux."""
    available = _available_bytes()
    if available is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + available
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
