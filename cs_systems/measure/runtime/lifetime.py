"""Lifetime of a measuring process: it ends with its parent, leaves no core dump, and reports its stack on a signal."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; do nothing on systems other than Linux."""
    from cs_systems.measure.runtime.guardian import PR_SET_PDEATHSIG, prctl  # its imports would slow down --help

    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_no_core() -> None:
    """Disable core dumps of this process: with a GPU they take long to write and delay its end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def torchrun_rank() -> int | None:
    """Return the rank that torchrun gave this process, or None if torchrun did not start it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def stack_file(scratch: Path, rank: int) -> Path:
    """Return the file to which a rank appends its Python stack at each SIGUSR1."""
    return scratch / f"stack-{rank}"


def store_file(scratch: Path) -> Path:
    """Return the path of the rendezvous file for ranks on one machine."""
    return scratch / "store"


def is_running(pid: int) -> bool:
    """Return whether a process of this machine exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
