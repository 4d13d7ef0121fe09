"""Format of rocpd: the SQLite database that AMD's rocprofv3 writes by default since ROCm 7."""

from __future__ import annotations

from pathlib import Path

from cs_systems.core.formats import SQLITE_MAGIC, Format, imported


def matches(head: bytes, path: Path) -> bool:
    """Return whether an SQLite file has rocpd's tables, of any version; a damaged file is recognised by its name."""
    from cs_systems.readers import _sqlite as sqlite  # a help lists the formats without opening a file

    tables = sqlite.tables(path) if head.startswith(SQLITE_MAGIC) else None
    return path.suffix == ".db" if tables == [] else any(name.startswith("rocpd_") for name in tables or ())


FORMAT = Format(
    title="a database of rocprofv3",
    matches=matches,
    suffixes=(".db",),
    read=imported("cs_systems.readers._rocpd"),
    record="`rocprofv3 --runtime-trace --output-format rocpd -- python train.py`",
    lacks="the same as its JSON",
)
