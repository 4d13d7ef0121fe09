"""Short form of a table for a narrow terminal: letters for caveats, and abbreviations that its notes explain."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cs_systems.config import ModelConfig
from cs_systems.core.fields import declared
from cs_systems.report.tables.columns import Column
from cs_systems.report.tables.table import Table

PREDICTED = ": predicted "  # separator in a note, between `oom` and the bytes
# model field that differs from its preset → its abbreviation: `large+num_layers=32` becomes `large+L32`
FIELDS = {name: each.field.short for name, each in declared(ModelConfig).items() if each.field.short}


def letters(codes: Iterable[str]) -> dict[str, str]:
    """Return a letter for each code, in order of appearance; the 27th is `a2`."""
    alphabet = string.ascii_lowercase
    return {
        code: alphabet[i % 26] + (str(i // 26 + 1) if i >= 26 else "") for i, code in enumerate(dict.fromkeys(codes))
    }


def short_form(table: Table, marks: Mapping[str, str], notes: Sequence[str]) -> Table | None:
    """Return the table with short cells, or None if it has none.

    Args:
        table: the whole table.
        marks: the letter of each caveat's code.
        notes: the notes of the table, with the letters before the caveats that they explain.
    """
    columns = tuple(_short_column(column, marks) for column in table.columns)
    if columns == table.columns:
        return None
    explained = dict[str, None]()
    for whole, short in zip(table.columns, columns, strict=True):
        for long_cell, cell in zip(whole.cells, short.cells, strict=True):
            if whole.name in ("size", "strategy") and cell != long_cell:
                explained[f"{cell}: {long_cell}"] = None
            elif PREDICTED in long_cell and cell != long_cell:
                explained["bytes after oom: predicted peak memory"] = None
    return replace(table, columns=columns, notes=(*explained, *notes))


def _short_column(column: Column, marks: Mapping[str, str]) -> Column:
    if column.name == "note":
        return replace(column, cells=tuple(_short_note(cell, marks) for cell in column.cells))
    if column.name == "strategy":
        short = {cell: _short_strategy(cell) for cell in column.cells}
        differ = len({*short.values()}) == len(short)
        return replace(column, cells=tuple(short[cell] for cell in column.cells)) if differ else column
    return replace(column, cells=tuple(map(_short_size, column.cells))) if column.name == "size" else column


def _short_note(cell: str, marks: Mapping[str, str]) -> str:
    codes = cell.split("; ")
    if all(code in marks for code in codes):
        return " ".join(sorted(marks[code] for code in codes))
    return cell.replace(PREDICTED, ": ") if cell.startswith("oom") else cell


def _short_strategy(label: str) -> str:
    """Return the strategy with its options as initials: `torch_ddp:gradient_as_bucket_view=true` has `gabv=true`."""
    name, *options = label.split(":")
    pairs = (option.partition("=") for option in options)
    return ":".join(
        [name, *("".join(word[:1] for word in key.split("_")) + sign + value for key, sign, value in pairs)]
    )


def _short_size(label: str) -> str:
    name, *changed = label.split("+")
    pairs = (field.partition("=") for field in changed)
    return "+".join([name, *(f"{FIELDS.get(field, field + sign)}{value}" for field, sign, value in pairs)])
