"""Origin of records for people: when they were written, by which commands, and on which hosts if recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cs_systems.record import Origin, RunRecord, recorded_files

MOST_COMMANDS = 3  # number of commands that `lines` names
FIRST_UNIX_S = 1_483_228_800.0  # 2017: an earlier time in a trace is from a clock that does not count from 1970
LAST_UNIX_S = 4_102_444_800.0  # 2100


def of(records: Iterable[RunRecord]) -> list[Origin]:
    """Return the known origins, the earliest first; records from before version 0.2 have none."""
    return sorted((r.origin for r in records if r.origin), key=lambda origin: origin.recorded_unix_s)


def date(origin: Origin) -> str:
    """Return the date and time to the second, as in ISO 8601: `2026-11-23 11:40:05Z`."""
    return f"{datetime.fromtimestamp(origin.recorded_unix_s, UTC):%Y-%m-%d %H:%M:%SZ}"


def moment(unix_s: float) -> str | None:
    """Return a time stated in a file, in the form of `date`; None if its clock does not count from 1970."""
    return date(Origin(unix_s, None)) if FIRST_UNIX_S < unix_s < LAST_UNIX_S else None


def span(origins: Sequence[Origin]) -> str:
    """Return the dates of the first and the last origin: `2026-11-23 11:40 to 11:52 UTC`."""
    first, last = (date(origin)[:16] for origin in (origins[0], origins[-1]))
    if first == last:
        return f"{first} UTC"
    return f"{first} to {last[11:] if last[:10] == first[:10] else last} UTC"


def commands(origins: Iterable[Origin]) -> list[str]:
    """Return the commands, without duplicates."""
    return [*dict.fromkeys(origin.command for origin in origins if origin.command)]


def hosts(origins: Iterable[Origin]) -> list[str]:
    """Return the hosts that were recorded on request, without duplicates."""
    return [*dict.fromkeys(origin.host for origin in origins if origin.host)]


def lines(records: Iterable[RunRecord]) -> list[str]:
    """Return a sentence for each command: when the records were written, on which hosts, and by which command."""
    groups: dict[str | None, list[Origin]] = {}
    for origin in of(records):
        groups.setdefault(origin.command, []).append(origin)
    found = []
    for command, origins in groups.items():
        where = f" on {', '.join(named)}" if (named := hosts(origins)) else ""
        found.append(f"recorded {span(origins)}{where}" + (f" by: {command}" if command else ""))
    more = len(found) - MOST_COMMANDS
    return found[:MOST_COMMANDS] + ([f"and by {more} more commands, which the records hold"] if more > 0 else [])


def of_file(file: Path, began_unix_s: float | None = None) -> list[str]:
    """Return when and by which command a trace or snapshot was recorded, as `lines` does.

    Args:
        file: The file; the record of its cell may be next to it.
        began_unix_s: Time that the file itself states, for a file without a record.
    """
    record = recorded_files(file.parent).get(file.name)
    if record is not None and record.origin is not None:
        return lines([record])
    if began_unix_s is None or moment(began_unix_s) is None:
        return []
    at = Origin(began_unix_s, None)
    return [f"recorded {span([at, at])}"]
