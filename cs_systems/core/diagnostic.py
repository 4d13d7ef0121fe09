"""Diagnostic of `doctor`: one row about one check, made by the worker, the command line or a profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cs_systems.record import Row


def diagnostic(check: str, found: str, state: str = "ok", remedy: str | None = None) -> Row:
    """Return a diagnostic as a row: {check, state, found, remedy}.

    The state is `ok`, `missing` (an option is not installed) or `problem` (something present gets in the way). The
    remedy is a command where there is one, and None where nothing is wrong.
    """
    return {"check": check, "state": state, "found": found, "remedy": remedy}
