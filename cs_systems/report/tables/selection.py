"""Selection of records by conditions on their columns: `select(records, ["attention=naive", "median_ms<10"])`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cs_systems.config import ConfigError
from cs_systems.record import RunRecord
from cs_systems.report.frame import STEP, frame, without_retried
from cs_systems.report.tables import columns as cols

if TYPE_CHECKING:
    import pandas as pd

ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
SIGNS = ("=", "!=", *ORDERS)
_MEANT = {"==": "=", "===": "=", "=<": "<=", "=>": ">=", "<>": "!=", "!==": "!=", "=!": "!="}
MOST_VALUES = 8  # of a column that an error lists
_CONDITION = re.compile(r"([\w.]+)\s*([=!<>~]+)\s*(.+)")


class Condition(NamedTuple):
    """Condition on a column; `values` has the alternatives of `=`."""

    text: str
    column: str
    sign: str
    values: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Return whether a value, in the unit of the column's name, meets the condition; an unknown one does not."""
        if value is None:
            return False
        if self.sign in ORDERS:
            return isinstance(value, int | float) and ORDERS[self.sign](value, float(self.values[0]))
        return any(_is(value, wanted) for wanted in self.values) == (self.sign == "=")


def condition(text: str, option: str, signs: Sequence[str] = SIGNS) -> Condition:
    """Parse `attention=naive,sdpa_flash`, `batch_size!=4` or `median_ms<10`.

    option: the option that the text was given to. signs: the operators that it takes.

    Raises:
        ConfigError: the text is none of these; the message names the option.
    """
    found = _CONDITION.fullmatch(text.strip())
    if found is None:
        others = f" (other operators: {', '.join(signs[1:])})" if signs[1:] else ""
        raise ConfigError(f"{option} {text!r} is not a condition; write COLUMN=VALUE, such as attention=naive{others}")
    name, sign, value = found.groups()
    if sign not in signs:
        meant = signs[0] if len(signs) == 1 else _MEANT.get(sign)
        write = f"write {name}{meant}{value}" if meant else f"use {_listed(signs)}"
        raise ConfigError(f"{sign!r} is not an operator of {option} in {text!r}; {write}")
    values = tuple(part.strip() for part in value.split(","))
    if sign in ORDERS and not _is_number(value):
        remedy = "give a number such as 1000 or 0.5, or use = or != for names"
        raise ConfigError(f"{sign} in {option} {text!r} compares numbers, but {value!r} is not one number; {remedy}")
    return Condition(text, name, sign, values)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _listed(signs: Sequence[str]) -> str:
    return ", ".join(signs[:-1]) + f" or {signs[-1]}" if len(signs) > 1 else signs[0]


def select(records: Sequence[RunRecord], texts: Sequence[str]) -> list[RunRecord]:
    """Return the records that meet every condition. Raises ConfigError if none does.

    A text without a sign is one more value of the condition before it: `size=xl` and `2.7B`.
    """
    chosen = without_retried(records)
    conditions: list[str] = []
    for text in texts:
        if conditions and not _CONDITION.fullmatch(text.strip()):
            conditions[-1] += f",{text}"
        else:
            conditions.append(text)
    for text in conditions:
        wanted = condition(text, "--where")
        known = values_of(frame(chosen), wanted.column)
        kept = [record for record, value in zip(chosen, known, strict=True) if wanted.holds(value)]
        if not kept:
            before = " and ".join(map(repr, conditions[: conditions.index(text)]))
            which = f"record that meets {before} also" if before else "record"
            found = [value for value in known if value is not None]
            about = "about " if any(isinstance(value, float) for value in found) else ""
            remedy = (
                f"change this condition to fit {'their' if before else 'the'} values of {wanted.column}: "
                f"{about}{listed(found)}"
                if found
                else f"leave out this condition, because {wanted.column} is unknown"
            )
            raise ConfigError(f"no {which} meets --where {text!r}; {remedy}")
        chosen = kept
    return chosen


def values_of(whole: pd.DataFrame, name: str) -> list[Any]:
    """Return a column's value for each record of a frame, of its step, in the unit of the name. Raises ConfigError."""
    spec = cols.parse(cols.full_name(name, whole), cols.phases_of(whole))
    rows = whole[(whole["phase"] == STEP) | whole["phase"].isna()].drop_duplicates("record").set_index("record")
    rows = rows.reindex(range(whole["record"].nunique())).rename_axis("record").reset_index()
    values = cols.values(spec, rows, whole)
    return [v / spec.unit.factor if spec.unit and isinstance(v, int | float) else v for v in values]


def listed(values: Iterable[Any]) -> str:
    """Return the different values of a column, the first of them if they are many."""
    texts = [*dict.fromkeys(cols.text(value, None) for value in values)]
    return ", ".join(texts[:MOST_VALUES] + ["…"] * (len(texts) > MOST_VALUES))


def _is(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted.lower() in (("true", "yes") if value else ("false", "no"))
    if isinstance(value, int | float):
        try:
            return float(value) == float(wanted)
        except ValueError:
            return False
    return str(value) == wanted
