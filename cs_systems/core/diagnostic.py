"""Diagnostic of `doctor`: a row with the result of one check, made by the worker, the command line or a profiler."""

from __future__ import annotations

from typing import Annotated, TypedDict

from cs_systems.core.tables import Column, Table

NEEDS_GPU = "needs a GPU"  # state of a check that no installation can fix on this machine


class Diagnostic(TypedDict):
    """Result of one check."""

    check: str
    # "ok", "missing" (an option is not installed), NEEDS_GPU, or "problem" (something present gets in the way)
    state: str
    found: Annotated[str, Column("result, → what to do")]
    remedy: str | None  # a command if there is one; None if nothing is wrong


DIAGNOSTICS = Table("diagnostics", Diagnostic, "checks of this machine", "check state found")


def diagnostic(check: str, found: str, state: str = "ok", remedy: str | None = None) -> Diagnostic:
    """Return the result of one check as a row."""
    return {"check": check, "state": state, "found": found, "remedy": remedy}
