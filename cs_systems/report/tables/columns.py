"""Columns of a table by name: `median_s`, in another unit `median_ms`, for one phase `backward.median_ms`.

Besides the columns of the frame there are `range_s` (p10 … p90) and `note`, which the tables add.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

from cs_systems.config import CONFIGURED, ConfigError, Phase, one_of
from cs_systems.core import tables, units
from cs_systems.core.collectives import readable_bytes
from cs_systems.core.printable import plain
from cs_systems.core.validation import did_you_mean
from cs_systems.report.collectives import OF_PHASE
from cs_systems.report.frame import CELL_COLUMNS, PHASE_COLUMNS
from cs_systems.report.frame_cells import FIELD_COLUMNS
from cs_systems.report.series import cell_columns

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = "–"
SHORT = {"forward": "fwd", "backward": "bwd", "synchronize": "sync", "optimizer": "opt"}  # headings of phases
# a column leaves the shared unit if its median in that unit is below this
SWITCH_BELOW = 1 / 50
LEAST_SHOWN = 1 / 100  # in the shared unit: a column with a smaller value has a unit in each cell


class Added(TypedDict):
    """Columns that tables have in addition to the frame's."""

    range_s: Annotated[tuple[float, float] | None, tables.Column("p10 … p90")]
    note: Annotated[str, tables.Column(meaning="caveats of the cell, or why it has no number")]


COLUMNS = {**CELL_COLUMNS, **PHASE_COLUMNS, **cell_columns(Added)}


class UnknownColumn(ConfigError):
    """Unknown column name; the message has the nearest names, and where to list all of them."""

    def __init__(self, name: str, listed_by: str = "cs_systems.frame(records).columns") -> None:
        self.name = name
        hint = did_you_mean(name, units.in_all_units(COLUMNS))
        super().__init__(f"unknown column {name!r}; {f'{hint} List' if hint else 'list'} the names with {listed_by}")


@dataclass(frozen=True)
class Column:
    """Column of a table: `cells` are text, `values` the data, in base units unless the name states another unit.

    All text is printable, even if names contain control characters.
    """

    name: str
    title: str
    unit: str
    cells: tuple[str, ...]
    values: tuple[Any, ...] = field(repr=False)
    numeric: bool
    legend: str = ""

    def __post_init__(self) -> None:
        for name in ("title", "unit", "legend"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        object.__setattr__(self, "cells", tuple(map(plain, self.cells)))

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def is_empty(self) -> bool:
        return all(cell in ("", UNKNOWN) for cell in self.cells)


class Spec(NamedTuple):
    """Parsed name of a column; `phase` None means the row's own, `unit` None the most readable one."""

    name: str
    phase: str | None
    column: str
    unit: units.Unit | None

    @property
    def suffix(self) -> str | None:
        return units.base_suffix("s" if self.column == "range_s" else self.column)


def parse(name: str, phases: Sequence[str]) -> Spec:
    """Parse a name or a heading: `backward.median_ms` → Spec(…, "backward", "median_s", ms), `mean` → `mean_s`.

    Raises ConfigError with the nearest names for an unknown one.
    """
    phase, _, column = name.rpartition(".")
    if phase and phases:
        one_of("phase", phase, phases)
    try:
        return Spec(name, phase or None, *units.resolve(column, COLUMNS))
    except ConfigError:
        if meant := _under_heading(column, () if phase else phases):
            return parse(f"{phase}.{meant}" if phase else meant, phases)
        raise UnknownColumn(column) from None


def full_name(name: str, whole: pd.DataFrame) -> str:
    """Return the name of the column with this heading, such as `step.median_s` for `step`; any other name unchanged.

    A name also counts as a heading if no column has the name: `batch` means `batch_size`.
    """
    if name not in COLUMNS:
        return _under_heading(name, phases_of(whole)) or name
    if name not in CELL_COLUMNS or whole[name].notna().any():
        return name
    alike = (other for other in CELL_COLUMNS if title(other) == name and whole[other].notna().any())
    return next(alike, name)


def title(column: str) -> str:
    """Return the heading of a column, or of a field without a column, without its unit."""
    one = COLUMNS.get(column)
    return (one and one.heading) or tables.heading(column)


def _under_heading(heading: str, phases: Sequence[str]) -> str | None:
    """Return the column with this heading, without a unit: `ranks` → `world_size`, `fwd` → `forward.median_s`."""
    headings = {name: f"{phase}.median_s" for phase in phases for name in (phase, SHORT.get(phase, phase))}
    headings |= {title(name): name for name in COLUMNS}
    return headings.get(heading)


def distinct(names: Iterable[str], rows: pd.DataFrame, whole: pd.DataFrame) -> list[str]:
    """Return the names without further names of a column that came before, possibly in another unit."""
    known, shown = phases_of(whole), phases_of(rows)
    found: dict[tuple[str | None, str], str] = {}
    for name in names:
        spec = parse(name, known)
        phase = None if [spec.phase] == shown or spec.column not in (*PHASE_COLUMNS, "range_s") else spec.phase
        found.setdefault((phase, spec.column), name)
    return [*found.values()]


def phases_of(frame: pd.DataFrame) -> list[str]:
    """Return the phases of all records in the order of a step; other phases come last."""
    order: dict[str, int] = {phase: place for place, phase in enumerate(Phase)}
    return sorted(dict.fromkeys(frame["phase"].dropna()), key=lambda phase: order.get(phase, len(order)))


def values(spec: Spec, rows: pd.DataFrame, whole: pd.DataFrame) -> list[Any]:
    """Return a value in base units for each of `rows`, None if unknown; (p10, p90) for range_s.

    whole: the frame with all phases.
    """
    if spec.column == "range_s":
        ends = (values(Spec(end, spec.phase, end, None), rows, whole) for end in ("p10_s", "p90_s"))
        return [None if None in pair else pair for pair in zip(*ends, strict=True)]
    column = rows[spec.column]
    if spec.phase is not None and spec.column in PHASE_COLUMNS:
        here = whole["phase"] == spec.phase
        column = whole[spec.column][here].set_axis(whole["record"][here]).reindex(rows["record"])
    return [None if missing else value for value, missing in zip(column.tolist(), column.isna(), strict=True)]


def make(names: Iterable[str], rows: pd.DataFrame, whole: pd.DataFrame) -> list[Column]:
    """Return the named columns of `rows`; columns of one quantity share a unit if they stay readable."""
    specs = [parse(name, phases_of(whole)) for name in names]
    found = [values(spec, rows, whole) for spec in specs]
    largest: dict[str | None, float] = {}  # suffix of a quantity → its largest median, which sets the unit
    for spec, column in zip(specs, found, strict=True):
        if spec.unit is None:
            largest[spec.suffix] = max(largest.get(spec.suffix, 0.0), _middle(column))
    shown = phases_of(rows)
    made = []
    for spec, column in zip(specs, found, strict=True):
        unit = spec.unit or _shared_unit(spec, column, largest[spec.suffix])
        if spec.column == "size_bytes" and spec.unit is None:  # sizes from KiB to GiB need a unit each
            unit, cells = None, tuple(UNKNOWN if v is None else readable_bytes(v) for v in column)
        elif unit and spec.unit is None and spec.column != "range_s" and spans_units(unit, _numbers(column)):
            unit, cells = None, tuple(UNKNOWN if v is None else units.human(v, spec.column) for v in column)
        else:
            cells = tuple(text(v, unit, grouped=spec.column not in FIELD_COLUMNS) for v in column)
        numeric = any(isinstance(v, int | float | tuple) and not isinstance(v, bool) for v in column)
        label = unit.label if unit else ""
        numbers = tuple(_in_unit(v, spec.unit) for v in column)
        made.append(Column(spec.name, _title(spec, shown), label, cells, numbers, numeric, legend(spec, rows)))
    return made


def unit_for(spec: Spec, column: list[Any]) -> units.Unit | None:
    """Return the unit in the name, or the one that suits these values; None for a column without a unit."""
    return spec.unit or _shared_unit(spec, column, _middle(column))


def _shared_unit(spec: Spec, column: list[Any], largest: float) -> units.Unit | None:
    if spec.suffix is None:
        return None
    middle = _middle(column)
    shared, own = (units.best_unit(units.SCALES[spec.suffix], [v]) for v in (largest, middle))
    return own if 0 < middle < shared.factor * SWITCH_BELOW else shared


def spans_units(unit: units.Unit, values: Iterable[float]) -> bool:
    """Return whether a column needs a unit in each cell: 512 B next to 3 GiB must not become `0.000000477 GiB`."""
    scale = next(scale for scale in units.SCALES.values() if unit in scale)
    least = unit.factor * LEAST_SHOWN
    if scale is units.SCALES["_bytes"]:
        least = max(least, 1 << 10)  # fewer bytes are counted, not shown as a fraction
    return unit is not scale[-1] and any(0 < abs(value) < least for value in values)


def _middle(column: Iterable[Any]) -> float:
    """Return the median magnitude of a column, without zeros, which fit any unit; 0 if nothing else is known."""
    return median([abs(v) for v in _numbers(column) if v] or [0.0])


def _numbers(column: Iterable[Any]) -> list[float]:
    ends = (v[1] if isinstance(v, tuple) else v for v in column)
    return [float(v) for v in ends if isinstance(v, int | float)]


def _title(spec: Spec, shown_phases: list[str]) -> str:
    """Return the heading: for a median its phase; for other columns with the phase, if it is not the row's own."""
    if spec.column == "median_s":
        return spec.phase or (shown_phases[0] if len(shown_phases) == 1 else "median")
    return " ".join(filter(None, [spec.phase, title(spec.column)]))


def legend(spec: Spec, rows: pd.DataFrame) -> str:
    """Return the meaning of a column, if its heading does not explain it."""
    one = OF_PHASE.get(spec.name) or COLUMNS[spec.column]
    note = one.note
    if one.counted and not rows["workload"].isin(CONFIGURED).any():
        note = one.counted
    if one.of_ranks and (rows["world_size"] > 1).any():
        note += one.of_ranks
    if one.peak:
        peaks = rows[[*one.peak]].dropna().drop_duplicates()
        if len(peaks) == 1:
            peak, source = peaks.iloc[0]
            note += f", {units.human(peak, one.peak[0])} ({source})"
    return note


def _in_unit(value: Any, unit: units.Unit | None) -> Any:
    if unit is None or value is None:
        return value
    return tuple(v / unit.factor for v in value) if isinstance(value, tuple) else value / unit.factor


def text(value: Any, unit: units.Unit | None, *, grouped: bool = False) -> str:
    """Format one value.

    grouped: whether to separate the thousands of a whole number: of a count, and not of an option's value or a step's
    number.
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, tuple):
        return " … ".join(units.significant(end / (unit.factor if unit else 1)) for end in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit is not None:
        return units.in_unit(value, unit)
    if isinstance(value, float):
        return units.significant(value)
    return f"{value:,}" if grouped and isinstance(value, int) else str(value)
