"""Processes that a sweep has left."""

from __future__ import annotations

import os

from cs_systems.runtime.fork_client import server_pids
from cs_systems.runtime.guardian import descendants


def leftover() -> set[int]:
    """Return the PIDs of this process's descendants, zombies too, except fork servers, which serve later sweeps."""
    return descendants(os.getpid()) - server_pids()
