"""Diagnostic of `doctor`: one row about one check, made by the worker, the command line or a profiler."""

from __future__ import annotations

from typing import TypedDict


class Diagnostic(TypedDict):
    """Result of one check."""

    check: str
    state: str  # "ok", "missing" (an option is not installed) or "problem" (something present gets in the way)
    found: str
    remedy: str | None  # a command where there is one; None where nothing is wrong


def diagnostic(check: str, found: str, state: str = "ok", remedy: str | None = None) -> Diagnostic:
    """Return the result of one check as a row."""
    return {"check": check, "state": state, "found": found, "remedy": remedy}
