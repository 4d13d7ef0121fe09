"""What ties workers to the process that they measure for: who ends with whom, which files they share. Floor 0."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; Linux only, elsewhere nothing."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


def leave_no_core() -> None:
    """Have the kernel write no core dump of this process: one with a GPU takes long to write, and ends only then."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def rank_in_job() -> int | None:
    """The rank that torchrun gave this process; None for one that was started by itself."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def rank_log(log: Path, rank: int) -> Path:
    """What one rank prints, beside the log of what started it."""
    return log.with_name(f"{log.stem}-rank{rank}{log.suffix}")


def stack_file(address: Path, rank: int) -> Path:
    """Where a rank writes, at each SIGUSR1, which functions it is in; beside the socket."""
    return address.with_name(f"stack-{rank}")
