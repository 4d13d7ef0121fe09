"""Loader of plain data from an untrusted pickle: `load(path, how) -> data`.

The unpickler refuses every global, so that nothing in the file can run. Its memory is limited in proportion to the
bytes read so far, since a few bytes of a pickle can request any amount.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from cs_systems.config import ConfigError
from cs_systems.core.formats import PICKLE, Unpacked, head, refuse_other, suffixes
from cs_systems.core.validation import shown
from cs_systems.readers._paths import check_file

MEMORY_PER_FILE_BYTE = 8  # bytes of memory as Python objects, per byte of a pickled snapshot
MOST_PER_BYTE = 16  # limit per byte of any pickle, beyond FREE_BYTES
FREE_BYTES = 1 << 28
CHUNK = 1 << 20
FEWER = "fewer events (max_entries of _record_memory_history)"
AGAIN = f"copy it again, or dump it again, with {FEWER} if the disk is full"
# Messages of the unpickler for input that ends too early, old protocols included.
_CUT = re.compile("truncated|Ran out of input|pickle data was")


class _Refusing(pickle.Unpickler):
    """Unpickler that makes only numbers, texts, lists, tuples and dictionaries."""

    def find_class(self, module: str, name: str) -> NoReturn:
        what = f"{module}.{name}"[:80]
        raise _Refused(what if what.isprintable() else ascii(what))

    def persistent_load(self, id: Any) -> NoReturn:
        raise _Refused(f"a persistent id ({shown(id)})")


class _Refused(Exception):
    """Error for a refused request of the pickle."""


def load(path: Path, how: str) -> Any:
    """Return the data pickled in a file, gzipped or not; `how` is the way to write such a file, for messages.

    Raises:
        ConfigError: The file is not a usable pickle; the message gives the cause and the remedy.
    """
    check_file(path, "snapshot", suffixes("memory"))
    refuse_other(path, "snapshot")
    if not PICKLE.match(head(path)):
        raise ConfigError(f"{path} is not a pickle file, as every memory snapshot of PyTorch is; write one with {how}")
    _refuse_beyond_memory(path)
    try:
        with closing(Unpacked(path)) as source, _metered_memory() as allow:
            return _Refusing(io.BufferedReader(_Metered(source, allow), CHUNK)).load()
    except _Refused as refused:
        if "torch._utils._rebuild" in str(refused):
            raise ConfigError(
                f"{path} holds tensors, as a checkpoint of torch.save does; give a memory snapshot"
            ) from None
        raise ConfigError(
            f"{path} was not loaded: it refers to {refused}, and a memory snapshot holds only numbers, texts, lists "
            f"and dictionaries; write one with {how}"
        ) from None
    except ConfigError:
        raise
    except EOFError:
        raise ConfigError(f"{path} is truncated; {AGAIN}") from None
    except MemoryError:
        raise ConfigError(
            f"{path} needs more memory than is free, or is damaged; read it on a machine with more memory, or dump it "
            f"again with {FEWER}"
        ) from None
    except Exception as error:  # a malformed pickle may raise anything
        why = str(error)
        wrong = "is truncated" if _CUT.search(why) else f"is a damaged pickle ({why[:200]!a})"
        raise ConfigError(f"{path} {wrong}; {AGAIN}") from None


def _refuse_beyond_memory(path: Path) -> None:
    """Raise ConfigError if the unpickled snapshot would exceed the available memory.

    The snapshot takes several times the size of its file, and an error is better than a machine that swaps.
    """
    size = path.stat().st_size
    needed, available = size * MEMORY_PER_FILE_BYTE, _available_bytes()
    if available is not None and needed > max(available, 2**30):
        raise ConfigError(
            f"{path} is {size / 2**30:.1f} GiB and needs about {needed / 2**30:.1f} GiB of memory, but only "
            f"{available / 2**30:.1f} GiB are free; record {FEWER}, or read it on a machine with more memory"
        )


def _available_bytes() -> int | None:
    """Return the memory that Linux reports as available without swapping; None on other systems."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


class _Metered(io.RawIOBase):
    """Byte stream of a pickle that reports the number of bytes before the unpickler uses them."""

    def __init__(self, source: Unpacked, allow: Callable[[int], None]) -> None:
        self._source, self._allow = source, allow

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._allow(self._source.count)
        return len(data)


@contextmanager
def _metered_memory() -> Iterator[Callable[[int], None]]:
    """Limit memory in proportion to the bytes read: a pickle that requests more raises MemoryError. Linux only."""
    available = _available_bytes()
    if available is None:
        yield lambda count: None
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + available if soft == resource.RLIM_INFINITY else min(used + available, soft)

    def allow(count: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (min(most, used + FREE_BYTES + MOST_PER_BYTE * count), hard))

    allow(0)
    try:
        yield allow
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
