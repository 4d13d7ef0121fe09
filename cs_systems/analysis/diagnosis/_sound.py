"""Rows of tables that rules can rely on, because they match the table's declaration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from cs_systems.core.tables import INDEX, Row, Tables, declared

_NAMES = frozenset(" ".join(INDEX.values()).split())


class Sound(Mapping[str, Sequence[Row]]):
    """Tables of a record, which may come from any program, without the rows that do not match the declaration.

    Undeclared tables, and tables without remaining rows, are left out. A table is judged when it is read.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._sound: dict[str, Sequence[Row]] = {}

    def __getitem__(self, name: str) -> Sequence[Row]:
        if name not in self._sound and name in self._tables and name in _NAMES:
            tables = _declared(name)
            self._sound[name] = [row for row in self._tables[name] if any(table.fits(row) for table in tables)]
        if rows := self._sound.get(name):
            return rows
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tables if name in self)

    def __len__(self) -> int:
        return len([*self])


_declared = cache(declared)
