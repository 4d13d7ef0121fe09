"""What `doctor` says of one thing. The worker, the command line and the profilers each find some."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cs_systems.record import Row


def finding(check: str, found: str, state: str = "ok", remedy: str | None = None) -> Row:
    """{check, state, found, remedy}. The state is `ok`, `missing` (an option that is not there) or `problem` (something
    that is there and is in the way). The remedy is a command where there is one, None where nothing is amiss."""
    return {"check": check, "state": state, "found": found, "remedy": remedy}
