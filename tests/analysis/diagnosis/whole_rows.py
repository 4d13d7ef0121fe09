"""Rows of a record as a program writes them, with every column, from those that a test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from cs_systems.core.tables import declared


def whole(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the tables with the columns that their rows lack: unknown, where they may be, else 0 or an empty text."""
    return {name: [_others(name) | row for row in rows] for name, rows in tables.items()}


def _others(name: str) -> dict[str, Any]:
    """Return a row without values of the first table of this name."""
    for table in declared(name):
        row = table._type()
        hints = get_type_hints(row)
        required = row.__required_keys__  # type: ignore[attr-defined]
        return {column: None if type(None) in get_args(hints[column]) else hints[column]() for column in required}
    return {}
