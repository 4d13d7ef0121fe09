"""Selection of records by a condition on their columns: `select(records, 'attention == "naive" and median_ms < 10')`.

The condition is written as for `DataFrame.query`. pandas would call any method that it names, so everything but
columns, operators and the methods below is refused first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from cs_systems.config import ConfigError
from cs_systems.core import units
from cs_systems.core.validation import did_you_mean
from cs_systems.record import RunRecord
from cs_systems.report.frame import STEP, frame, without_retried
from cs_systems.report.tables import columns as cols

if TYPE_CHECKING:
    import pandas as pd

MOST_VALUES = 8  # number of a column's values that an error lists
OF_COLUMNS = ("str", "isna", "notna", "isin", "between")
OF_TEXTS = ("contains", "startswith", "endswith", "fullmatch", "lower", "upper")
EXAMPLE = 'attention == "naive" and median_ms < 10'


def select(records: Sequence[RunRecord], condition: str) -> list[RunRecord]:
    """Return the records that meet the condition. Raises ConfigError if none does."""
    import pandas as pd

    chosen = without_retried(records)
    columns = _Columns(condition, frame(chosen))
    try:
        expression = ast.unparse(columns.visit(ast.parse(condition.strip(), mode="eval")))
        named = {f"column_{i}": _series(values) for i, values in enumerate(columns.found.values())}
        met = pd.DataFrame(named, range(len(chosen))).eval(expression, engine="python")
    except SyntaxError:
        columns.refuse("is not a condition")
    except ConfigError:
        raise
    except Exception as error:  # pandas raises various errors, such as for comparisons of different types
        columns.refuse(f"cannot be evaluated ({type(error).__name__}: {error})")
    if not isinstance(met, pd.Series) or not {True, False}.issuperset(met.dropna()):
        columns.refuse("is not true or false for a record")
    kept = [record for record, holds in zip(chosen, met.eq(other=True), strict=True) if holds]
    if not kept:
        found = "; ".join(f"{name}: {listed(values) or 'unknown'}" for name, values in columns.found.items())
        raise ConfigError(f"no record meets --where {condition!r}; change it to fit the records' values ({found})")
    return kept


class _Columns(ast.NodeTransformer):
    """Replacement of the names of columns by `column_0`, `column_1` and so on, in the order of `found`.

    A name may have a unit and a phase, such as `backward.median_ms`. found: the values of each column, by its name.
    """

    def __init__(self, condition: str, whole: pd.DataFrame) -> None:
        self._condition, self._whole, self._phases = condition, whole, cols.phases_of(whole)
        self.found: dict[str, list[Any]] = {}

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"--where {self._condition!r} {why}; write a condition as for DataFrame.query, such as {EXAMPLE}"
        )

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return self._column(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self._phases and node.attr not in OF_COLUMNS:
            return self._column(f"{node.value.id}.{node.attr}")
        known = OF_TEXTS if isinstance(node.value, ast.Attribute) and node.value.attr == "str" else OF_COLUMNS
        if node.attr not in known:
            self.refuse(f"has {ast.unparse(node)!r}, but after this dot there can be {', '.join(known)}")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Attribute):
            self.refuse(f"calls {ast.unparse(node.func)!r}, but only methods of columns can be called")
        return self.generic_visit(node)

    def visit_Pow(self, _: ast.Pow) -> NoReturn:
        self.refuse("has **, which may take forever")

    def _column(self, name: str) -> ast.Name:
        try:
            self.found[name] = values_of(self._whole, name)
        except cols.UnknownColumn as error:
            hint = did_you_mean(error.name, units.in_all_units(cols.COLUMNS))
            remedy = f'{hint} Put text into quotes: "{name}"' if hint else f'put text into quotes: "{name}"'
            raise ConfigError(f"--where {self._condition!r} has an unknown column {name!r}; {remedy}") from None
        return ast.Name(f"column_{[*self.found].index(name)}", ast.Load())


def _series(values: Sequence[Any]) -> pd.Series[Any]:
    """Return a column, numeric if no value is known, because comparisons with unknown numbers are false."""
    import pandas as pd

    return pd.Series(values, dtype=float if all(value is None for value in values) else None)


def values_of(whole: pd.DataFrame, name: str) -> list[Any]:
    """Return the values of a column for the step of each record, in the unit of the name.

    Raises ConfigError for an unknown column.
    """
    spec = cols.parse(cols.full_name(name, whole), cols.phases_of(whole))
    rows = whole[(whole["phase"] == STEP) | whole["phase"].isna()].drop_duplicates("record").set_index("record")
    rows = rows.reindex(range(whole["record"].nunique())).rename_axis("record").reset_index()
    values = cols.values(spec, rows, whole)
    return [v / spec.unit.factor if spec.unit and isinstance(v, int | float) else v for v in values]


def listed(values: Iterable[Any]) -> str:
    """Return the distinct known values of a column, at most MOST_VALUES, as text."""
    texts = [*dict.fromkeys(cols.text(value, None) for value in values if value is not None)]
    return ", ".join(texts[:MOST_VALUES] + ["…"] * (len(texts) > MOST_VALUES))
