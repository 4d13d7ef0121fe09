"""Lock for tests that run nsys: simultaneous sessions lose their connections, and then end without a report."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_with_nsys() -> Iterator[None]:
    """Wait until no other process of the tests runs nsys, and keep the others waiting."""
    with (Path(tempfile.gettempdir()) / "cs_systems-nsys.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
