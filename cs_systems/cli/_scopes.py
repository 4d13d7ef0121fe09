"""Scopes and kernels of a profile of Triton's Proton, as tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs_systems.cli._tables import Section, document_text, first_rows
from cs_systems.core.tables import Row, Table
from cs_systems.readers.forms.scopes import KERNELS, SCOPES, Scopes

KNOWN: dict[str, Table[Any]] = {table.name: table for table in (SCOPES, KERNELS)}
RATES = "rate and traffic: work and bytes that the program declared, over all the time of the row"


def scopes_text(profile: Scopes, tables: Sequence[str], top: int | None, format: str, output: Path | None) -> list[str]:
    """Return the profile's tables with their heading; `top` None shows the default number of rows, in CSV all."""
    of: dict[str, Sequence[Row]] = {"scopes": profile.scopes, "kernels": profile.kernels}
    sections: list[Section] = []
    for name in tables:
        rows = of[name]
        if not rows and len(tables) > 1:
            continue
        shown, more = first_rows(KNOWN[name], rows, top, format)
        notes = [RATES] if any(row["flops_per_s"] or row["bytes_per_s"] for row in rows) else []
        notes += [f"{more} more {name}; --top shows more"] if more else []
        sections.append((KNOWN[name], shown, notes))
    heading = [" · ".join([profile.source, "proton", *profile.devices, f"{len(profile.scopes)} scopes and kernels"])]
    return document_text(format, [*heading, *profile.notes], sections, output)
