"""Readers of profilers' files, one module per format; each returns plain data such as a Trace or a Snapshot.

Each module exports one constant, FORMAT. It is imported to recognise a file or to list the formats in a help text, so
numpy is imported only when a file is read. `forms/` holds the types that readers return; modules that begin with `_`
are helpers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cs_systems.core.formats import TIMELINE, named, offered, recognised, refuse_other, suffixes
from cs_systems.core.validation import ConfigError, listed

if TYPE_CHECKING:
    from cs_systems.readers.forms.jobs import Job
    from cs_systems.readers.forms.trace import Trace


def read(path: Path, process: int | None = None) -> Trace:
    """Return the trace that a tool wrote.

    Args:
        path: The trace.
        process: The pid of the process to read; without it, the one with the most kernels.

    Raises:
        ConfigError: The file is not a usable trace; the message says what is missing and how to record it.
    """
    from cs_systems.readers._paths import check_file

    check_file(path, "trace", suffixes(TIMELINE), "analyze")
    found = refuse_other(path, "analyze") or named(path)
    if found and found.holds != TIMELINE and found.command == "analyze":
        raise ConfigError(
            f"{path} is {found.title}, which has no timeline; read it with cs_systems.readers.{found.name}.read"
        )
    if not found or not found.read or found.holds != TIMELINE:
        raise ConfigError(listed(f"{path} is not a trace; give", offered("analyze")))
    trace: Trace = found.read(path, process)
    return trace


def cached(path: Path, process: int | None = None) -> Trace:
    """Return the result of `read`, from the cache if the file is unchanged."""
    from cs_systems.readers import _cache

    return _cache.cached(path, process, read)


def ranks_of(paths: Sequence[Path], only_if_certain: bool) -> dict[Path, int] | None:
    """Return the rank of each file; None if the files are not the ranks of one job.

    Args:
        paths: The traces.
        only_if_certain: Accept only ranks that each trace states, or each file name after the word `rank`; all must
            differ and have one world size. If False, also accept the only number in which the names differ, else the
            order of the files; later checks of the traces show whether they belong to one job.
    """
    from cs_systems.readers.forms.jobs import ranks_by_name

    jobs = {path: _stated(path) for path in paths}
    known = {path: one.rank for path, one in jobs.items() if one.rank is not None}
    sizes = {one.world_size for one in jobs.values() if one.world_size}
    found = known if len(known) == len(paths) else ranks_by_name(paths, only_if_certain)
    if not only_if_certain:
        return found if len(found) == len(paths) else {path: number for number, path in enumerate(paths)}
    certain = len(paths) > 1 and len(found) == len(paths) == len({*found.values()}) and len(sizes) < 2
    return found if certain else None


def _stated(path: Path) -> Job:
    """Return the identity in the job that the file's header states, without reading the rest of the trace."""
    from cs_systems.readers.forms.jobs import Job

    try:
        found = recognised(path)
        return found.job(path) if found and found.job else Job()
    except (ConfigError, OSError, EOFError, ValueError, RecursionError):  # reading the trace will report the cause
        return Job()
