"""Table that any format can render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cs_systems.core.printable import plain
from cs_systems.report.tables.columns import Column


@dataclass(frozen=True)
class Table:
    """Table that any format can render; `statuses` has one entry per row, and `optional` columns may be dropped.

    `remedy` says how to see columns that a narrow terminal drops. `short` is the same table with shorter cells, which a
    terminal shows before it drops a column. `name` is its label in a paper; "" for the first words of its caption.
    """

    caption: str
    columns: tuple[Column, ...]
    notes: tuple[str, ...]
    statuses: tuple[str, ...]
    optional: tuple[str, ...] = ()
    remedy: str = "choose columns with cs-systems report DIR --columns"
    short: Table | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "caption", plain(self.caption))
        object.__setattr__(self, "notes", tuple(map(plain, self.notes)))

    def notes_of(self, columns: Sequence[Column]) -> list[str]:
        """Return the legends of the columns that are shown, then the table's notes."""
        return [*dict.fromkeys(c.legend for c in columns if c.legend), *self.notes]
