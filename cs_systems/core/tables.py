"""Tables: each is declared once, with the type of its rows and with what a person sees of them.

A table is declared at the function that returns its rows:

    class GapRow(TypedDict):
        cause: str
        time_s: float
        share: Annotated[float, Column("of wall time")]

    @table("GPU idle time by cause, per step", "cause time_s share")
    def gaps(profile: Profile) -> list[GapRow]: ...

Tables that code with torch fills must be readable without torch. Each is a `Table` in the file that predicts or judges
the same numbers: memory in `formulas.memory.tables`, collectives in `formulas.communication`.

A row is a plain dictionary, as JSON stores it. The name of a column holds its unit: `_s` seconds, `_bytes`, `_flops`,
`_share` a fraction of 1. None is an unknown value. A column that is `NotRequired` is in some rows only. A column of
mappings, `bytes: dict[str, int]`, stands for a column per key: `forward_bytes`, with the heading `forward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import UnionType
from typing import (
    Any,
    Generic,
    NotRequired,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from cs_systems.core import units

# row of any table, for code that treats all tables alike, such as printing, choosing columns and merging; read-only
Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
R = TypeVar("R", bound=Row)
P = ParamSpec("P")

# Module → names of the tables of a record, a trace or a job that it declares, in the order in which they are shown.
# Help texts and reserved names use it without importing the modules.
INDEX = {
    "cs_systems.analysis.attribution.tables": "steps ratio phases families kernels layers parts attention gaps "
    "host_gaps waits cpu_updates fusable scores overlap ranges",
    "cs_systems.analysis.attribution.range_tree": "range_tree",
    "cs_systems.analysis.attribution.operator_table": "operators",
    "cs_systems.analysis.attribution.module_tables": "tree blocks classes modules",
    "cs_systems.analysis.attribution.timeline": "overhead coverage notes",
    "cs_systems.analysis.attribution.gathers": "gathers",
    "cs_systems.analysis.attribution.overlap": "streams overlap",
    "cs_systems.analysis.attribution.memory_ranges": "memory_ranges memory_ranges_of",
    "cs_systems.analysis.replay.what_ifs": "what_if",
    "cs_systems.analysis.comparison.ranks": "ranks collectives beside",
    "cs_systems.analysis.comparison.dtypes": "dtypes",
    "cs_systems.analysis.comparison.precision": "precision_error training_curve",
    "cs_systems.analysis.comparison.own_code": "own_code strategy_error",
    "cs_systems.analysis.comparison.loop_findings": "whole_loop own_python slow_steps slow_start later_steps "
    "garbage_collection growth padding iterators forward_operators repeated_forward outcome updates unused_passes "
    "element_sums inner_lines dropped_gradients repeated_backward broadcasts threads python_threads repeated_modules "
    "single_elements replaced_parameters never_stepped "
    "remade_optimizers fused_updates denormals learning_rates double_softmax unregistered paired_targets "
    "input_gradients unused_gradients dense_gradients repeated_calls hooks anomaly_detection double_precision "
    "slow_settings own_tools one_hot_products samples_as_time rate_factors rate_schedules loaded_weights random_draws "
    "evaluation_mode empty_clipping repeated_rows flat_operators cut_samples covariances many_draws product_orders "
    "sparse_factors unread_rows copied_factors attention_weights activation_formulas same_derivatives "
    "distribution_checks unused_outputs undone_updates unsampled",
    "cs_systems.analysis.comparison.loop_ranks": "loop_ranks late_rank loop_exchange loop_collectives "
    "unreduced_gradients",
    "cs_systems.readers.ncu": "counters",
    "cs_systems.record": "ran",
    "cs_systems.core.caveats": "graph_breaks",
    "cs_systems.core.experiments": "experiments",
    "cs_systems.formulas.cost": "cost",
    "cs_systems.formulas.peaks": "ceiling",
    "cs_systems.formulas.energy": "energy",
    "cs_systems.formulas.communication": "ranks sent setup link",
    "cs_systems.formulas.memory.tables": "memory memory_phases memory_components memory_forecast memory_unpredicted "
    "memory_parts rank_memory residuals residual_blocks residual_stream backward_blocks",
    "cs_systems.formulas.rounding": "autocast_contexts accumulation summation normalization normalization_range",
}


def names_in(*modules: str) -> tuple[str, ...]:
    """Return the names of the tables that these modules declare."""
    return tuple(name for module in modules for name in INDEX[f"cs_systems.{module}"].split())


def declared(name: str) -> list[Table[Any]]:
    """Return the tables of this name; two if a record and a job share it. Imports the modules that declare them."""
    modules = (import_module(module) for module, names in INDEX.items() if name in names.split())
    tables = (each for module in modules for each in vars(module).values() if isinstance(each, Table))
    return [table for table in tables if table.name == name]


@dataclass(frozen=True)
class Column:
    """Column as it is printed.

    heading: "" for the column's name without its unit. note: its explanation, below a table that shows it. beside: the
    width of the other columns on a terminal; texts longer than the remaining width are shortened. own_unit: whether
    each cell has its own unit. form: the format of a number, for `format()`; "" for three digits in the best unit, or
    all digits of a whole number, with separated thousands if it is a count. drop: 0 if every terminal shows it; of the
    others, a narrow terminal drops the lowest first. wraps: whether a long word may be names joined by +, between which
    a line may end. signed: whether a number may be negative. meaning: its description in a schema, where no note is
    needed below a table.
    """

    heading: str = ""
    note: str = ""
    beside: int = 0
    own_unit: bool = False
    form: str = ""
    drop: int = 0
    wraps: bool = False
    signed: bool = False
    meaning: str = ""


@dataclass(frozen=True, eq=False)
class Table(Generic[R]):
    """Table with the type of its rows.

    shown: the printed columns, in order; "" for all. CSV has every column. notes: sentences below it. most: number of
    rows shown by default. brief: number of rows in a command's short answer; None if the short answer omits the table.
    headings: headings in this table that differ from the columns' own.
    """

    name: str
    row: type[R]
    caption: str
    shown: str = ""
    notes: tuple[str, ...] = ()
    most: int | None = None
    brief: Callable[[Sequence[R]], Sequence[R]] | None = None
    headings: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Every column of the rows."""
        return {name: _column(hint) for name, hint in get_type_hints(self._type(), include_extras=True).items()}

    @cached_property
    def titles(self) -> dict[str, str]:
        """Printed columns in order, with their headings."""
        names = self.shown.split() or self.columns
        return {name: self.headings.get(name) or self.columns[name].heading or heading(name) for name in names}

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that a narrow terminal may drop, in this order."""
        return tuple(sorted((n for n in self.titles if self.columns[n].drop), key=lambda n: self.columns[n].drop))

    def of(self, tables: Tables) -> Sequence[R]:
        """Return the rows of this table in a record; empty if it has none."""
        return cast("Sequence[R]", tables.get(self.name, ()))

    def first(self, tables: Tables) -> R | None:
        """Return the first row of this table in a record, None if it has none."""
        return next(iter(self.of(tables)), None)

    def first_or_empty(self, tables: Tables) -> R:
        """Return the first row of this table in a record, an empty one if it has none: read it with `get`."""
        return self.first(tables) or cast("R", {})

    @cached_property
    def kinds(self) -> dict[str, tuple[type, ...]]:
        """Types of each column's values."""
        return {name: _alternatives(hint) for name, hint in get_type_hints(self._type()).items()}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """Columns of every row.

        `__required_keys__` alone is wrong in a file with `from __future__ import annotations`, where `NotRequired` is
        only a text.
        """
        of_class: frozenset[str] = self._type().__required_keys__  # type: ignore[attr-defined]
        hints = get_type_hints(self._type(), include_extras=True)
        return tuple(name for name in hints if name in of_class and get_origin(hints[name]) is not NotRequired)

    def fits(self, row: Row) -> bool:
        """Return whether a row, perhaps from another program, has the required columns and only valid values."""
        return all(name in row for name in self.required) and all(
            _is_of(row[name], kinds, is_signed=self.columns[name].signed)
            for name, kinds in self.kinds.items()
            if name in row
        )

    def filled(self, rows: Sequence[R]) -> dict[str, Sequence[Row]]:
        """Return the rows under the table's name, in the form of a record's results."""
        return {self.name: rows}

    def _type(self) -> type[R]:
        return self.row


@dataclass(frozen=True, eq=False)
class Filled(Table[R], Generic[R, P]):
    """Table with the function that returns its rows; it is called like the function."""

    by: Callable[P, list[R]] = field(kw_only=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.by(*args, **kwargs)

    def _type(self) -> type[R]:
        return cast("type[R]", get_args(get_type_hints(self.by)["return"])[0])


def table(
    caption: str, shown: str = "", *, name: str = "", **others: Any
) -> Callable[[Callable[P, list[R]]], Filled[R, P]]:
    """Declare the table of the rows that the decorated function returns; its name is the function's by default."""

    def declared(by: Callable[P, list[R]]) -> Filled[R, P]:
        return Filled(name or by.__name__, cast("type[R]", dict), caption, shown, by=by, **others)

    return declared


def first(count: int) -> Callable[[Sequence[R]], Sequence[R]]:
    """Return a function that selects the first `count` rows of a table for a short answer."""
    return lambda rows: rows[:count]


def by_name(*tables: Filled[Any, ...]) -> dict[str, Filled[Any, ...]]:
    return {table.name: table for table in tables}


def heading(column: str) -> str:
    """Return a column's name without its unit: `time_s` → "time", `tokens_per_s` → "tokens/s"."""
    suffix = units.base_suffix(column) or ""
    rate = {"_per_s": "/s", "_per_j": "/J"}.get(suffix, "")
    return (column.removesuffix(suffix) or column).strip("_").replace("_", " ") + rate


def first_row(tables: Tables, name: str) -> Row:
    """Return the first row of a table; an empty row if there is none."""
    return next(iter(tables.get(name, ())), {})


def _is_of(value: Any, kinds: tuple[type, ...], *, is_signed: bool) -> bool:
    if value is None or isinstance(value, (str, bool)):
        return type(value) in kinds
    is_number = isinstance(value, (int, float)) and (int in kinds or float in kinds)
    return is_number and math.isfinite(value) and (is_signed or value >= 0)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _column(hint: Any) -> Column:
    """Return the Column in `Annotated[…]`, also inside `NotRequired[…]`."""
    if get_origin(hint) is NotRequired:
        return _column(get_args(hint)[0])
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Column)), Column())
