"""Columns of the table of cells as the types of its rows declare them, and the frame that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from cs_systems.config import ConfigError
from cs_systems.core.tables import Column
from cs_systems.core.validation import shown
from cs_systems.record import OR_AGAIN

if TYPE_CHECKING:
    import pandas as pd

    from cs_systems.record import RunRecord

TEXT, INTEGER, REAL, FLAG = "object", "Int64", "float64", "boolean"  # pandas types of the frame's columns
_KINDS = {int: INTEGER, float: REAL, bool: FLAG}


class CellColumn(NamedTuple):
    """Column of the table of cells: a `Column` with what depends on the cells.

    kind: the pandas type of its values. counted: the note for workloads from outside the package. of_ranks: addition to
    the note if a step has several ranks. peak: columns with the rate of which it is a share, and with the rate's
    source. command: the command that measures it, on a GPU only.
    """

    heading: str = ""
    note: str = ""
    meaning: str = ""
    kind: str = TEXT
    counted: str = ""
    of_ranks: str = ""
    peak: tuple[str, str] | None = None
    command: str = ""


def cell_columns(*rows: type) -> dict[str, CellColumn]:
    """Return the columns that these types of rows declare, by a `Column` or `CellColumn` in `Annotated[…]`.

    The pandas type follows from the type of the values. The files of cells, phases and collectives have no `from
    __future__ import annotations`: evaluating texts would slow each start.
    """
    hints = {name: hint for row in rows for name, hint in get_type_hints(row, include_extras=True).items()}
    return {name: _declared(hint) for name, hint in hints.items()}


def _declared(hint: Any) -> CellColumn:
    bare, column = (hint.__origin__, hint.__metadata__[0]) if get_origin(hint) is Annotated else (hint, CellColumn())
    if isinstance(column, Column):
        column = CellColumn(column.heading, column.note, column.meaning)
    found: CellColumn = column._replace(kind=kind_of(*get_args(bare), bare))
    return found


def kind_of(*types: Any) -> str:
    """Return the pandas type of values of these types."""
    return next((_KINDS[one] for one in types if one in _KINDS), TEXT)


def typed(
    values: Mapping[str, list[Any]], columns: Mapping[str, CellColumn], owners: Sequence[RunRecord]
) -> pd.DataFrame:
    """Return the values of the columns as a frame; owners: the record of each row."""
    import pandas as pd

    made = {name: _column(name, values[name], one.kind, owners) for name, one in columns.items()}
    return pd.DataFrame(made, copy=False)


def _column(name: str, values: Sequence[Any], kind: str, owners: Sequence[RunRecord]) -> Any:
    """Return a column of that type, or Float64 if a number is too large, such as a prediction for 10¹² tokens.

    A column of numbers is an array, which the frame uses directly; a Series for each takes twice as long.
    """
    import pandas as pd

    try:
        if kind == TEXT:
            return pd.Series(values, dtype=kind)
        return _array(values, kind)
    except OverflowError:
        return pd.array([None if value is None else float(value) for value in values], dtype="Float64")
    except (TypeError, ValueError) as error:
        wrong = _first_wrong(values, kind)
        raise ConfigError(
            f"the record with key {owners[wrong].key} is malformed: its {name} is {shown(values[wrong])}; delete its "
            f"line of records.jsonl, {OR_AGAIN}"
        ) from error


def _array(values: Sequence[Any], kind: str) -> Any:
    """Return the values as an array of that type. Raises TypeError or ValueError for a value that does not fit."""
    import pandas as pd

    column: Any = pd.array(values, dtype=kind)  # type: ignore[call-overload]
    if column.ndim > 1:
        raise TypeError("a list instead of a number")
    return column


def _first_wrong(values: Sequence[Any], kind: str) -> int:
    """Return the index of the first value that does not fit a column of that type."""
    for number, value in enumerate(values):
        try:
            _array([value], kind)
        except (TypeError, ValueError):
            return number
    return 0
