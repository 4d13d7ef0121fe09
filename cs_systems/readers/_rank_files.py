"""Ranks of a job among several files: the rank of each, from the trace itself or from the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cs_systems.config import ConfigError
from cs_systems.core.file_types import SQLITE_MAGIC, Unpacked, head
from cs_systems.readers._chrome_trace import Text, header
from cs_systems.readers.forms.jobs import Job, job, ranks_by_name


def stated(path: Path) -> Job:
    """Return the identity that the file's header states, without reading the trace; of nsys, none."""
    try:
        if path.suffix == ".nsys-rep" or head(path).startswith(SQLITE_MAGIC):
            return Job()
        with closing(Unpacked(path)) as file:
            return job(header(Text(file, path)))
    except (ConfigError, OSError, EOFError, ValueError, RecursionError):  # reading the trace will tell which
        return Job()


def ranks_of(paths: Sequence[Path], only_if_certain: bool) -> dict[Path, int] | None:
    """Return the rank of each file; None if the files are not the ranks of one job.

    Args:
        paths: The traces.
        only_if_certain: Accept only ranks that each trace, or the word `rank` in each name, states, all different and
            of one world size. Otherwise also take the only number in which the names differ, else the order of the
            files, and let reading the traces decide whether they are of one job.
    """
    jobs = {path: stated(path) for path in paths}
    known = {path: one.rank for path, one in jobs.items() if one.rank is not None}
    sizes = {one.world_size for one in jobs.values() if one.world_size}
    found = known if len(known) == len(paths) else ranks_by_name(paths, only_if_certain)
    if not only_if_certain:
        return found if len(found) == len(paths) else {path: number for number, path in enumerate(paths)}
    certain = len(paths) > 1 and len(found) == len(paths) == len({*found.values()}) and len(sizes) < 2
    return found if certain else None
