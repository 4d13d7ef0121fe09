"""Read-only connection to a SQLite file that is not trusted, for the readers `nsys` and `rocpd`."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cs_systems.config import ConfigError
from cs_systems.core.formats import GZIP_MAGIC

LONGEST_VALUE = 1 << 26  # bytes of a text, blob or row: without a limit an expression can allocate any amount


def connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    database.text_factory = lambda raw: raw.decode("utf-8", "replace")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    database.execute("PRAGMA trusted_schema=OFF")
    database.execute("PRAGMA temp_store=MEMORY")
    return database


def too_large(path: Path) -> ConfigError:
    """Return the error for a file that cannot be read because memory is too small."""
    return ConfigError(f"{path} needs more memory than is free; use a machine with more memory, or record fewer steps")


def damaged(path: Path, what: str, error: Exception, remedy: str) -> ConfigError:
    """Return the error for a file that SQLite cannot read: compressed, or a damaged `what`."""
    with path.open("rb") as file:
        if file.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
            return ConfigError(f"{path} is compressed; unpack it first (gzip --decompress)")
    return ConfigError(f"{path} is a damaged {what} ({error}); {remedy}")


def tables(path: Path) -> list[str]:
    """Return the names of a file's tables; none if it is damaged."""
    try:
        with closing(connect(path)) as database:
            return [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return []


def columns(database: sqlite3.Connection) -> dict[str, list[str]]:
    """Return the columns of each table; views are left out, because a view can contain any computation."""
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        name: [column[1] for column in database.execute(f'PRAGMA table_info("{name}")')]
        for (name,) in tables
        if name.isidentifier()
    }
