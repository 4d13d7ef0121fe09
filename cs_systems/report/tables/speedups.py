"""Columns of a table with the speed-up of each cell over its baseline: `with_speedups(table, …, "attention=naive")`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cs_systems.config import ConfigError
from cs_systems.record import RunRecord
from cs_systems.report.frame import by_kind
from cs_systems.report.tables.columns import UNKNOWN, Column, full_name, text
from cs_systems.report.tables.selection import listed, values_of
from cs_systems.report.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd

    from cs_systems.core.statistics import Comparison

TOO_WIDE = 4  # largest ratio of an interval's ends; a wider interval is left out


def with_speedups(
    table: Table, records: Sequence[RunRecord], whole: pd.DataFrame, rows: Sequence[int], relative_to: str
) -> Table:
    """Return the table with two more columns before its notes: speed-up and its 95% interval.

    The speed-up is the ratio of the medians of a step.

    Args:
        table: the table of these records.
        records: records of one workload.
        whole: their frame.
        rows: the record of each row, by its index.
        relative_to: FIELD=VALUE of the baselines, such as `attention=naive`.

    Raises:
        ConfigError: it is malformed, or no record is a baseline.
    """
    from cs_systems.analysis.comparison.runs import speedups

    found = re.fullmatch(r"\s*([\w.]+)\s*=\s*([^=\s].*?)\s*", relative_to)
    if found is None:
        raise ConfigError(f"--relative-to {relative_to!r} has no setting and value; write it as attention=naive")
    name, wanted = found.groups()
    known = values_of(whole, name)
    baselines = [value is not None and wanted in (str(value), text(value, None)) for value in known]
    field = full_name(name, whole)  # such as world_size, which has the heading `ranks`
    compared = speedups(records, field, baselines)  # also refuses columns that are not settings
    if not any(baselines):
        values = listed(known) or "all unknown"
        raise ConfigError(
            f"no cell of {next(iter(by_kind(records)))} meets --relative-to {relative_to!r}; choose among the values "
            f"of {name} ({values}), or leave out these cells with --where"
        )
    shown = [None if baselines[i] else compared[i] for i in rows]
    gains = tuple(None if c is None else 1 / c.ratio for c in shown)
    texts = tuple(
        "1" if baselines[i] else UNKNOWN if gain is None else f"{gain:.2f}×"
        for i, gain in zip(rows, gains, strict=True)
    )
    legend = f"speed-up: median step of the cell with {relative_to} over this cell's; interval: 95% confidence"
    added = (
        Column("speedup", "speed-up", "", texts, gains, numeric=True, legend=legend),
        Column("speedup_range", "interval", "", tuple(map(_text, shown)), tuple(map(_ends, shown)), numeric=True),
    )
    before = [column for column in table.columns if column.name != "note"]
    after = table.columns[len(before) :]
    return replace(table, columns=(*before, *added, *after))


def _ends(found: Comparison | None) -> tuple[float, float] | None:
    """Return the interval of the speed-up, the inverse of the ratio of times."""
    return None if found is None or found.low is None or found.high is None else (1 / found.high, 1 / found.low)


def _text(found: Comparison | None) -> str:
    if (ends := _ends(found)) is None:
        return UNKNOWN
    low, high = ends
    return "too noisy" if high > TOO_WIDE * low else f"{low:.2f} … {high:.2f}"
