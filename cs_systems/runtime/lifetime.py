"""Lifetime of a process that measures: it ends with its parent, leaves no core dump, and says where it is."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from cs_systems.runtime.guardian import PR_SET_PDEATHSIG, prctl


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; Linux only, elsewhere nothing."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_no_core() -> None:
    """Have the kernel write no core dump of this process: one with a GPU takes long to write, and ends only then."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def torchrun_rank() -> int | None:
    """Return the rank that torchrun gave this process; None for one that was started by itself."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def stack_file(scratch: Path, rank: int) -> Path:
    """Name the file into which a rank writes, at each SIGUSR1, the functions that it is in."""
    return scratch / f"stack-{rank}"


def store_file(scratch: Path) -> Path:
    """Name the file through which the ranks of one machine meet."""
    return scratch / "store"


def is_running(pid: int) -> bool:
    """Check that a process of this machine exists and is more than an exit status that nobody has read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
