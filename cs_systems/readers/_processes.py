"""Choice of the process to read from a file with several, and notes about the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from cs_systems.config import ConfigError
from cs_systems.core.units import counted

MOST_LISTED = 20  # limit of processes that a message names


def listed(names: Iterable[str]) -> str:
    first = list(islice(names, MOST_LISTED + 1))
    return ", ".join(first[:MOST_LISTED]) + (", …" if first[MOST_LISTED:] else "")


def chosen_process(
    path: Path, counts: Mapping[int, int], what: str, wanted: int | None, *, can_merge: bool = False
) -> tuple[int, str | None]:
    """Return the pid of the process to read, and a note where the file holds others.

    Args:
        path: The file.
        counts: Number of kernels or ranges by pid; if empty and none is wanted, the pid is 0.
        what: The noun for what is counted, in the singular.
        wanted: The process to read; without it, the one with the highest count.
        can_merge: Whether the processes can be merged as the ranks of one job.

    Raises:
        ConfigError: The wanted process is not among the counted ones.
    """
    if wanted is not None and wanted in counts:
        return wanted, None
    if wanted is None and len(counts) < 2:
        return next(iter(counts), 0), None
    known = listed(f"{pid} ({counted(count, what)})" for pid, count in sorted(counts.items()))
    if wanted is not None:
        remedy = f"choose the process among {known}" if counts else "leave out the process, because the file names none"
        raise ConfigError(f"{path} holds no {what} of process {wanted}; {remedy}")
    busiest = min(counts, key=lambda pid: (-counts[pid], pid))
    ranks = "; if they are the ranks of a job, --ranks merges them" if can_merge else ""
    return busiest, (
        f"the file holds several processes: {known}; process {busiest} is read, because it has the most {what}s; "
        f"--process reads another{ranks}"
    )


def ranges_elsewhere(counts: Mapping[int, int], launcher: int) -> str:
    """Return the note for a trace with its ranges in other processes than the launches of kernels.

    If a single other process has ranges, they are used, matched by time: in a container, one program may have two
    process numbers.

    Args:
        counts: Number of ranges by the pid of each other process.
        launcher: Pid of the process that launched the kernels.
    """
    of = ", ".join(f"{pid} ({counted(count, 'range')})" for pid, count in sorted(counts.items()))
    if len(counts) > 1:
        return (
            f"process {launcher} launched the kernels and has no range; those of the processes {of} do not count, as "
            "it is unknown which belong to it"
        )
    return f"process {launcher} launched the kernels and has no range: those of process {of} count, by time alone"
