"""Check for processes that a sweep has left running."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cs_systems.measure.runtime.fork_client import server_pids
from cs_systems.measure.runtime.guardian import descendants


def leftover(besides: Iterable[int] = ()) -> dict[int, str]:
    """Return the command lines of this process's descendants by PID, zombies too.

    Fork servers are left out, because they serve later sweeps.

    Args:
        besides: processes that ran before, which are left out with all their descendants, because the browser in tests
            of pages starts and ends processes at any time.
    """
    known = {*besides}
    theirs = known.union(*map(descendants, known))
    return {pid: _command_line(pid) for pid in descendants(os.getpid()) - server_pids() - theirs}


@contextmanager
def nothing_left(seconds: float = 30.0) -> Iterator[None]:
    """Check that processes started in the block end, within this many seconds after it."""
    before = leftover()
    yield
    deadline = time.monotonic() + seconds
    while left := leftover(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended"
