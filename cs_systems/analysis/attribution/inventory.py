"""List of files: the format of each, what was recorded, and which tables it can fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, TypedDict

from cs_systems.analysis.attribution.kernel_families import is_collective
from cs_systems.analysis.attribution.profile import Profile
from cs_systems.core.formats import TIMELINE, Format, named, recognised
from cs_systems.core.sources import Source
from cs_systems.core.tables import Column, Table


class FileRow(TypedDict):
    """File in a list of several files; None means that the file has no such value."""

    file: Annotated[str, Column(beside=50)]
    format: str
    device: str | None
    rank: int | None
    duration_s: Annotated[float | None, Column(drop=1)]
    kernels: int | None
    steps: int | None
    cell: str | None  # cell of the run that wrote the file
    holds: Annotated[str | None, Column("tables with data")]  # tables with data
    command: str | None  # command that reads the file


def traces_in(sources: Sequence[Source]) -> list[Source]:
    """Return the files that are traces; a file given by name counts as one unless its content is another format."""
    return [source for source in sources if _is_trace(source)]


def format_of(source: Source) -> Format | None:
    """Return the format of a file that a command reads: by content, or by name if the user named the file itself."""
    found = recognised(source.path) or (None if source.is_inside else named(source.path))
    return found if found and found.read else None


def _is_trace(source: Source) -> bool:
    found = format_of(source)
    return found.holds == TIMELINE if found else not source.is_inside


def row_of_profile(source: Source, profile: Profile) -> FileRow:
    trace = profile.trace
    recorded = [trace.kernels.start_s, trace.kernels.end_s, trace.ranges.start_s, trace.ranges.end_s]
    times = [float(edge) for column in recorded if len(column) for edge in (column.min(), column.max())]
    devices = dict.fromkeys(trace.devices.get(device, f"GPU {device}") for device in profile.devices)
    return {
        "file": source.label,
        "format": trace.profiler,
        "device": ", ".join(devices) or None,
        "rank": trace.job.rank if trace.job else None,
        "duration_s": max(times) - min(times) if times else None,
        "kernels": len(trace.kernels),
        "steps": len(profile.steps),
        "cell": None,
        "holds": ", ".join(_tables(profile)),
        "command": "analyze",
    }


def _tables(profile: Profile) -> list[str]:
    """Return the names of the tables for which the trace has data."""
    trace = profile.trace
    has = {
        "kernels": bool(len(trace.kernels)),
        "phases": profile.phase_coverage > 0,
        "layers": profile.layer_coverage > 0,
        "overlap": bool(is_collective(trace.kernels).any()),
        "ranges": bool(len(trace.ranges)),
    }
    return [name for name, there in has.items() if there]


def row_of_other(source: Source) -> FileRow | None:
    """Return the row of a file that is not a trace; None if no command reads the file."""
    found = format_of(source)
    return _row(source, found.name, found.holds, found.command) if found else None


def row_of_error(source: Source) -> FileRow:
    """Return the row of a trace that cannot be read."""
    return _row(source, "unreadable", None, None)


def _row(source: Source, format: str, holds: str | None, command: str | None) -> FileRow:
    return {
        "file": source.label,
        "format": format,
        "device": None,
        "rank": None,
        "duration_s": None,
        "kernels": None,
        "steps": None,
        "cell": None,
        "holds": holds,
        "command": command,
    }


def labelled(profile: Profile, source: Source) -> Profile:
    """Return the profile with the file's label as its source, as shown to the user."""
    return replace(profile, trace=replace(profile.trace, source=source.label))


FILES = Table("files", FileRow, "files", "file format rank duration_s kernels steps")
HOLDS = Table("holds", FileRow, "contents of the files", "file device cell holds")
