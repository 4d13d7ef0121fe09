"""Types of the frame's columns, and the frame that is made of typed columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError
from cs_systems.core.validation import shown
from cs_systems.record import OR_AGAIN

if TYPE_CHECKING:
    import pandas as pd

    from cs_systems.record import RunRecord

TEXT, INTEGER, REAL, FLAG = "object", "Int64", "float64", "boolean"  # pandas types of the frame's columns


def typed(values: Mapping[str, list[Any]], kinds: Mapping[str, str], owners: Sequence[RunRecord]) -> pd.DataFrame:
    """Return the values as a frame; kinds: the type of each column. owners: the record of each row."""
    import pandas as pd

    columns = {name: _column(name, values[name], kind, owners) for name, kind in kinds.items()}
    return pd.DataFrame(columns, copy=False)


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
