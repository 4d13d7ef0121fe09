"""Scopes and kernels of a profile of Triton's Proton, as tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cs_systems.cli._tables import Part, document_text
from cs_systems.core.rows import Row
from cs_systems.readers.forms.scopes import Scopes

# Table → (caption, columns with their headings, rows shown by default).
KNOWN: dict[str, tuple[str, dict[str, str], int]] = {
    "scopes": (
        "scopes and their kernels, nested",
        {
            "scope": "scope", "calls": "kernels", "time_s": "time", "share": "share of time", "cpu_s": "CPU time",
            "flops_per_s": "rate", "bytes_per_s": "traffic", "cycles": "cycles", "samples": "samples",
            "stalled_share": "stalled",
        },
        30,
    ),
    "kernels": (
        "kernels by time",
        {
            "kernel": "kernel", "device": "device", "calls": "calls", "time_s": "time", "mean_s": "mean",
            "share": "share", "flops_per_s": "rate", "bytes_per_s": "traffic",
        },
        10,
    ),
}  # fmt: skip
RATES = "rate and traffic: work and bytes that the program declared, over all the time of the row"


def scopes_text(profile: Scopes, tables: Sequence[str], top: int | None, format: str, output: Path | None) -> list[str]:
    """Return the profile's tables with their heading; `top` None shows the default number of rows, in CSV all."""
    of: dict[str, Sequence[Row]] = {"scopes": profile.scopes, "kernels": profile.kernels}
    parts: list[Part] = []
    for name in tables:
        caption, titles, most = KNOWN[name]
        rows = of[name]
        if not rows and len(tables) > 1:
            continue
        limit = top or (len(rows) if format == "csv" else most)
        notes = [RATES] if any(row["flops_per_s"] or row["bytes_per_s"] for row in rows) else []
        if rows[limit:]:
            notes.append(f"{len(rows) - limit} more {name}; --top shows more")
        parts.append((caption, rows[:limit], titles, notes))
    heading = [" · ".join([profile.source, "proton", *profile.devices, f"{len(profile.scopes)} scopes and kernels"])]
    return document_text(format, [*heading, *profile.notes], parts, output)
