"""Validation of the tables that a user's workload returns: plain rows, which every later report can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cs_systems.config import ConfigError
from cs_systems.core.tables import INDEX

OWN_TABLES = frozenset(" ".join(INDEX.values()).split())  # tables that this package makes and reads by column name
MOST_ROWS, MOST_COLUMNS, LONGEST_TEXT, LONGEST_PHASE = 100_000, 1_000, 10_000, 200
DESCRIPTION = "the result of describe()"
_REMEDY = "use None, or Python's bool, int, float or str; of a tensor or a NumPy number, give .item()"


def plain_tables(tables: Any) -> dict[str, list[dict[str, Any]]]:
    """Return a workload's tables in the form for a record. Raises ConfigError for anything but tables."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"tables() returned an object {_kind(tables)}; return a dict from a table's name to its rows")
    found = {}
    for name, rows in tables.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"tables() gives a table the name {name!r:.60}; name it by a text of letters, digits and _ that does "
                "not begin with a digit"
            )
        if name in OWN_TABLES:
            raise ConfigError(f"tables() has a table {name!r}, a name that cs_systems reserves; choose another name")
        if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
            raise ConfigError(f"table {name!r} is {_kind(rows)}; make it a list of dicts, one for each row")
        if len(rows) > MOST_ROWS:
            raise ConfigError(f"table {name!r} has {len(rows)} rows; give at most {MOST_ROWS}")
        plain = [plain_row(f"row {number} of table {name!r}", row) for number, row in enumerate(rows)]
        for number, row in enumerate(plain):
            if different := plain[0].keys() ^ row.keys():
                raise ConfigError(
                    f"rows 0 and {number} of table {name!r} differ in the column {min(different)!r:.60}; give every "
                    "row the same columns, with None where a value is missing"
                )
        found[name] = [{column: row[column] for column in plain[0]} for row in plain]
    return found


def plain_row(what: str, row: Any, is_checked: bool = True) -> dict[str, Any]:
    """Return a row in the form for a record. Raises ConfigError unless it maps names to plain values."""
    if not is_checked:
        return dict(row)
    if not isinstance(row, Mapping):
        raise ConfigError(f"{what} is {_kind(row)}; make it a dict from names to None, bools, numbers or texts")
    if len(row) > MOST_COLUMNS:
        raise ConfigError(f"{what} has {len(row)} fields; give at most {MOST_COLUMNS}")
    for name, value in row.items():
        if not isinstance(name, str) or not name or len(name) > LONGEST_TEXT:
            raise ConfigError(
                f"{what} has a field named {name!r:.60}; name it by a text of 1 to {LONGEST_TEXT} characters"
            )
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ConfigError(f"{name!r:.60} in {what} is {_kind(value)}; {_REMEDY}")
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ConfigError(f"{name!r:.60} in {what} has {len(value)} characters; give at most {LONGEST_TEXT}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{name!r:.60} in {what} does not fit into 64 bits; give it as a float")
    tokens = row.get("tokens") if what == DESCRIPTION else None
    if isinstance(tokens, str) or (isinstance(tokens, float) and not tokens.is_integer()):
        raise ConfigError(f"'tokens' in {what} is {tokens!r:.60}; give the tokens of a step as an int, or None")
    return dict(row)


def check_phases(names: Sequence[Any]) -> None:
    """Raise ConfigError unless the names of phases are short texts."""
    for name in names:
        if not isinstance(name, str) or not name or len(name) > LONGEST_PHASE:
            raise ConfigError(
                f"step() yields a phase named {name!r:.60}; name it by a text of 1 to {LONGEST_PHASE} characters"
            )


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
