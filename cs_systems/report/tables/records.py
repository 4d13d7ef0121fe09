"""Records as tables: `render(records, format="terminal", columns=None, pivot=None, phases=None, width=None) -> str`.

A row is one record, or one phase of it with several `phases`; columns are named as in `columns`. A column without a
phase refers to the row's own, which is `step` by default. A column with one value throughout moves to the caption; each
table's caveats follow it, with their remedies.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.comparison import loop_time
from cs_systems.config import FIELDS, PRESETS, ConfigError, one_of
from cs_systems.core import units
from cs_systems.core.caveats import LOOP_REMEDIES, REMEDIES, Caveat, beyond
from cs_systems.core.fields import Subject
from cs_systems.core.printable import shortened, text_cell
from cs_systems.core.units import counted
from cs_systems.record import RAN, RunRecord, measured_by
from cs_systems.report.frame import CELL_COLUMNS, CLEAN, PHASE_COLUMNS, STEP, by_kind, frame, without_retried
from cs_systems.report.frame_phases import known_phases
from cs_systems.report.tables import columns as cols
from cs_systems.report.tables import layout, short
from cs_systems.report.tables.columns import Column, Spec
from cs_systems.report.tables.speedups import with_speedups
from cs_systems.report.tables.table import Table

if TYPE_CHECKING:
    import pandas as pd


# configuration fields that apply to any step, also to one that takes no configuration
ANY_STEP_FIELDS = ("precision", *(name for name, each in FIELDS.items() if each.field.is_measurement))
LONGEST_TITLE = 48  # characters of a workload in a caption, such as a script with all its arguments
MOST_LOOPS = 3  # number of loops whose total times are told
MOST_REASONS = 3  # number of messages of one caveat that a note lists
_PLACES = re.compile(r"(.*\bin: )(.*)")
_NUMBER = re.compile(r"[-+]?\d(?:[\d,]*\d)?(?:\.\d+)?")


@dataclass(frozen=True)
class CountedCaveat:
    """Caveat and the number of cells that have it."""

    code: str
    count: int
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code} ({counted(self.count, 'cell')}): {self.message} → {self.remedy}"


def render(
    records: Sequence[RunRecord],
    format: str = "terminal",
    columns: Sequence[str] | None = None,
    pivot: str | None = None,
    phases: Sequence[str] | None = None,
    width: int | None = None,
    color: bool = False,
    sort: str | None = None,
    relative_to: str | None = None,
    added: Sequence[str] = (),
) -> str:
    """Return the records as text in one of `formats.FORMATS`: a table for each workload, and its caveats.

    `pivot` is "ROWS:COLUMNS:VALUE", as in "size,context_length:attention:median_ms". `width` (characters) and `color`
    are for the terminal only. `sort` is a column, `NAME:desc` for the largest first. `relative_to` is FIELD=VALUE: its
    cells are the baselines of a column with the speed-up. `added` are columns after the times, next to the default
    ones. CSV without columns is the whole frame. Raises ConfigError for an unknown format, column or phase.
    """
    from cs_systems.report.tables.formats import FORMATS

    write = FORMATS[one_of("format", format, FORMATS)]
    for phase in phases or ():
        one_of("phase", phase, known_phases(records))
    if format == "csv" and not (columns or pivot or sort or relative_to):
        whole = frame(without_retried(records))
        for name in whole.select_dtypes("object").columns:
            whole[name] = [text_cell(value) if isinstance(value, str) else value for value in whole[name]]
        rows = whole[whole["phase"].isna() | whole["phase"].isin(phases or cols.phases_of(whole))]
        return rows.to_csv(index=False, columns=[*CELL_COLUMNS, *PHASE_COLUMNS])
    return write(tables(records, columns, pivot, phases, sort, relative_to, added), width, color)


def tables(
    records: Sequence[RunRecord],
    columns: Sequence[str] | None = None,
    pivot: str | None = None,
    phases: Sequence[str] | None = None,
    sort: str | None = None,
    relative_to: str | None = None,
    added: Sequence[str] = (),
) -> list[Table]:
    """Return one Table per workload among the records, in order of appearance; profiled ones are separate.

    The arguments are the same as `render`'s.
    """
    made, kinds = [], by_kind(without_retried(records))
    names = [*dict.fromkeys(str(of_kind[0].config["workload"]) for of_kind in kinds.values())]
    titles = dict(zip(names, shortened(names, LONGEST_TITLE), strict=True))
    for chosen in kinds.values():
        chosen = [_without_timing_caveats(record) for record in chosen]
        marks = _failure_marks(chosen)
        whole = frame(chosen)
        whole["note"] = [_note(row, marks) for row in whole[[*_NOTED]].to_dict("records")]
        rows = _rows(whole, phases)
        doubts = counted_caveats(chosen)
        letters = short.letters(doubt.code for doubt in doubts)
        before, after = (*loop_times(chosen), *_elsewhere(whole), *_same_step(chosen)), _failures(chosen, marks)
        notes = (*before, *map(str, doubts), *after)
        if pivot is not None:
            table, letters = _pivoted(whole, rows, pivot, notes), {}
        else:
            if sort:
                rows = _sorted(rows, sort, whole)
            table = _listed(whole, rows, columns, added, notes, on_cpu=_is_on_cpu(chosen))
            if relative_to:
                table = with_speedups(table, chosen, whole, rows["record"].tolist(), relative_to)
        marked = (*before, *(" ".join(filter(None, [letters.get(d.code), str(d)])) for d in doubts), *after)
        name = str(whole["workload"].iloc[0])
        table = replace(table, name=name, caption=table.caption.replace(name, titles[name], 1))
        made.append(replace(table, short=short.short_form(table, letters, marked)))
    return made


def loop_times(records: Iterable[RunRecord]) -> list[str]:
    """Return a line for each loop that was timed: its total time, and the division among kinds of steps.

    Of many loops, such as those of a search or of `ab`, none: the rows have their steps.
    """
    timed = [r for r in records if r.is_loop and r.is_timing and r.config.get("profiler", CLEAN) == CLEAN]
    lines = [(r, loop_time.sentence(loop_time.loop_time(r.measurement))) for r in timed if r.measurement]
    if len(lines) > MOST_LOOPS:
        return []
    return [line if len(lines) == 1 else f"repeat {record.repeat}: {line}" for record, line in lines if line]


def _sorted(rows: pd.DataFrame, sort: str, whole: pd.DataFrame) -> pd.DataFrame:
    """Return the rows by a column, `NAME` or `NAME:desc`; rows without a value come last."""
    import pandas as pd

    name, _, order = sort.partition(":")
    one_of("order of --sort", order or "asc", ("asc", "desc"))
    phases = cols.phases_of(whole)
    values = cols.values(cols.parse(cols.full_name(name, whole), phases), rows, whole)
    keys = _sort_key(pd.Series([v[0] if isinstance(v, tuple) else v for v in values], index=rows.index, name=name))
    order_of_rows = keys.sort_values(ascending=order != "desc", kind="stable", na_position="last").index
    return rows.loc[order_of_rows].reset_index(drop=True)


def _without_timing_caveats(record: RunRecord) -> RunRecord:
    """Return the record without the caveats of a timing, if it is not a timing."""
    if layout.is_timed(record.config["workload"], record.config.get("profiler", CLEAN)):
        return record
    return replace(record, warnings=tuple(w for w in record.warnings if w.code in layout.MEMORY_CAVEATS))


def _elsewhere(whole: pd.DataFrame) -> list[str]:
    """Return a note with the command that shows the results, if they are not in these rows."""
    measured = measured_by(_profiler(whole))
    if _is_timed(whole) or measured == "memory":
        return []
    if measured == "counters":
        return ["to see the counters: cs-systems analyze FILE.ncu-rep"]
    if Subject.of(str(whole["workload"].iloc[0])) is Subject.STRATEGY_ERROR:
        return ["to see the results: repeat cs-systems parallel with --out DIR, which measures no cell again"]
    return ["to see the results: cs-systems precision --show DIR"]


def _same_step(records: Sequence[RunRecord]) -> list[str]:
    """Return a note if cells ran the same step, because the workload takes no configuration."""
    plain_steps = (r for r in records if any(ran.get("takes_config") is False for ran in RAN.of(r.results)))
    cells = {record.run_config for record in plain_steps}
    alike = Counter(tuple(getattr(cell, name) for name in ANY_STEP_FIELDS) for cell in cells)
    if (most := max(alike.values(), default=0)) < 2:
        return []
    name = next(iter(cells)).workload
    return [
        f"{name} takes no configuration, so {counted(most, 'cell')} ran the same step; to vary sizes, pass a factory "
        "(config, device)"
    ]


def _rows(whole: pd.DataFrame, phases: Sequence[str] | None) -> pd.DataFrame:
    """Return the rows of these phases, and of records without any phase, sorted by the columns that vary."""
    rows = whole[whole["phase"].isna() | whole["phase"].isin(phases or [STEP])]
    return in_order(rows)


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort rows of one workload by the columns that distinguish them."""
    return rows.sort_values(varying(rows)[0], key=_sort_key, kind="stable").reset_index(drop=True)


def _sort_key(column: pd.Series) -> pd.Series:
    """Return sort keys: numbers by size, model sizes from small to large, other names by first appearance."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column):
        return column
    names = [*dict.fromkeys(column)]
    if column.name == "size":
        names.sort(key=lambda name: _size_rank(str(name)))  # a record of a cell that did not run may have no size
    return column.map({name: rank for rank, name in enumerate(names)})


def _size_rank(label: str) -> tuple[int, bool]:
    """Return a sort key that puts `large+num_layers=32` after `large`, before `xl`; unknown sizes come last."""
    name, _, _ = label.partition("+")
    order = [*PRESETS]
    return (order.index(name) if name in PRESETS else len(order), label != name)


def varying(whole: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return (columns that distinguish the cells, columns with one value), without columns that repeat another.

    Unknown values and unremarkable defaults are left out.
    """
    apart, constant = [], []
    for name in layout.identity(whole["workload"].iloc[0]):
        if (echo := layout.ECHOES.get(name)) and not (whole[name] != whole[echo]).fillna(False).any():
            continue
        if whole[name].nunique(dropna=False) > 1:
            apart.append(name)
        elif not whole[name].isna().all() and not layout.is_silent(name, whole[name].iloc[0]):
            constant.append(name)
    ways = [name for name in layout.COMPARED if whole[name].nunique() > 1]
    if ways and whole.duplicated([*apart, "phase"]).any():
        apart += ways
    if not apart:
        apart = constant[:1] if constant and constant[0] not in layout.ENDING else ["workload"]
    constant = [name for name in constant if name not in apart]
    return apart, constant


def _listed(
    whole: pd.DataFrame,
    rows: pd.DataFrame,
    asked: Sequence[str] | None,
    added: Sequence[str],
    notes: Sequence[str],
    *,
    on_cpu: bool,
) -> Table:
    apart, constant = varying(whole)
    chosen = layout.layout(whole["workload"].iloc[0])
    if not _is_timed(rows):
        of_memory = measured_by(_profiler(rows)) == "memory"
        chosen = chosen._replace(measured=layout.MEMORY_COLUMNS if of_memory else ("note",), has_times=False)
    shown = cols.phases_of(rows)
    if len(shown) > 1:
        apart.append("phase")
    phases = [p for p in cols.phases_of(whole) if p != STEP]
    beside = [f"{p}.median_s" for p in phases] if shown == [STEP] and len(phases) > 1 else []
    times = [*beside, "median_s"] if chosen.has_times else []
    named = [cols.full_name(name, whole) if name in CELL_COLUMNS else name for name in asked or ()]
    added = [cols.full_name(name, whole) for name in added]
    names = named or cols.distinct([*apart, *times, *added, *chosen.measured], rows, whole)
    made = cols.make(names, rows, whole)
    if not asked:  # an unknown default column is noise; a requested one is shown empty
        made = [c for c in made if c.name in (*apart, *added) or not c.is_empty]
    caption = _caption(rows, [c for c in constant if c not in names], shown)
    leaves = chosen.leaves
    if chosen.leaves == layout.OTHER.leaves:
        leaves += _shortest_first([c for c in made if c.name in beside and c.name not in layout.ESSENTIAL])
    notes = [*notes, *_without_memory(made, on_cpu)]
    return Table(caption, tuple(made), tuple(notes), tuple(rows["status"]), () if asked else leaves)


def _is_on_cpu(records: Sequence[RunRecord]) -> bool:
    """Return whether all records are of a CPU; a cell that did not run may have no device."""
    return {record.environment.device for record in records if record.environment} == {"cpu"}


def _without_memory(made: Sequence[Column], on_cpu: bool) -> list[str]:
    """Return notes on the columns of allocated memory that are empty: where they are measured."""
    places: dict[str, list[str]] = {}
    for column in made:
        command = cols.COLUMNS[cols.parse(column.name, ()).column].command
        if command and column.is_empty:
            where = "on a GPU only" if on_cpu else f"by cs-systems {command}"
            places.setdefault(where, []).append(column.title)
    return [f"{', '.join(titles)}: measured {where}" for where, titles in places.items()]


def _shortest_first(phases: Sequence[Column]) -> tuple[str, ...]:
    """Return the names of the columns of phases, the shortest times first; a step may have any number of phases."""

    def total(column: Column) -> float:
        return sum(value for value in column.values if isinstance(value, float))

    return tuple(column.name for column in sorted(phases, key=total))


def _caption(rows: pd.DataFrame, constant: list[str], shown_phases: list[str]) -> str:
    """Return the caption of a table.

    Example: `train_step on NVIDIA H200; constant: precision bf16, batch 4; medians of 10 steps (wall clock)`.
    """
    subject = str(rows["workload"].iloc[0])
    if "device_name" in constant:
        subject += f" on {rows['device_name'].iloc[0]}"
    timed = _is_timed(rows)
    if (profiler := _profiler(rows)) != CLEAN:
        subject += f" under {profiler}" + (", times include its overhead" if timed else "")
    subject += "" if timed else ", not timed"
    common = {c: rows[c].tolist()[0] for c in constant if c not in layout.SILENT_COLUMNS}
    if rows["ran_optimizer"].nunique() == 1:
        common["ran_optimizer"] = rows["ran_optimizer"].dropna().iloc[0]
    named = [_named(c, v) for c, v in common.items() if not layout.is_silent(c, v)]
    parts = [subject]
    if named:
        parts.append(f"constant: {', '.join(dict.fromkeys(named))}")
    counts = rows["n"].dropna()
    if len(counts) and timed:
        span = f"{counts.min()}" if counts.nunique() == 1 else f"{counts.min()} to {counts.max()}"
        clock = {(False,): " (wall clock)", (True,): " (device clock, launches queued ahead)"}
        held = tuple(rows["held"].dropna().unique()) if shown_phases == [STEP] else ()
        parts.append(f"medians of {span} steps{clock.get(held, '')}")
    return "; ".join(parts)


def conditions(whole: pd.DataFrame) -> str:
    """Return the conditions that all cells of a workload share, as a caption has them, and the range of spreads."""
    rows = whole[whole["phase"].isna() | (whole["phase"] == STEP)]
    spreads = rows["spread"].dropna()
    named = _caption(rows, varying(whole)[1], [STEP])
    if not len(spreads) or not _is_timed(rows):
        return named
    ends = dict.fromkeys(units.significant(100 * end) for end in (spreads.min(), spreads.max()))
    return f"{named}; p10 to p90 spans {' to '.join(ends)}% of the median"


def _is_timed(rows: pd.DataFrame) -> bool:
    return layout.is_timed(str(rows["workload"].iloc[0]), _profiler(rows))


def _profiler(rows: pd.DataFrame) -> str:
    """Return the profiler of the rows of one table; CLEAN if none."""
    return str(rows["profiler"].fillna(CLEAN).iloc[0])


def _named(column: str, value: Any) -> str:
    suffix = units.base_suffix(column)
    shown = units.human(value, suffix) if suffix else cols.text(value, None)
    return f"{cols.title(column)} {shown}"


_NOTED = ("status", "warnings", "reason", "predicted_peak_bytes")  # columns from which the note is made


def _note(row: Mapping[Any, Any], marks: Mapping[tuple[str, str | None], str]) -> str:
    """Return why a row has no number (with the predicted peak if it did not fit), or the codes of its caveats."""
    if row["status"] == "ok":
        return row["warnings"] or ""
    mark = marks[row["status"], row["reason"]]
    predicted = row["predicted_peak_bytes"]
    if row["status"] == "oom" and isinstance(predicted, int | float):
        return f"{mark}{short.PREDICTED}{units.human(predicted, 'bytes')}"
    return mark


def _failure_marks(records: Iterable[RunRecord]) -> dict[tuple[str, str | None], str]:
    """Return the short mark of each reason in a row: the status, numbered if one status has several reasons."""
    reasons: dict[str, dict[str | None, None]] = {}
    for record in records:
        if record.status != "ok":
            reasons.setdefault(record.status, {}).setdefault(record.reason)
    return {
        (status, reason): f"{status} [{number}]" if len(of_status) > 1 else status
        for status, of_status in reasons.items()
        for number, reason in enumerate(of_status, 1)
    }


def _failures(records: Iterable[RunRecord], marks: Mapping[tuple[str, str | None], str]) -> list[str]:
    counts = Counter((r.status, r.reason) for r in records)
    return [f"{m} ({counted(counts[which], 'cell')}): {which[1] or 'no reason recorded'}" for which, m in marks.items()]


def counted_caveats(records: Iterable[RunRecord]) -> list[CountedCaveat]:
    """Return each caveat once, in order of appearance, with its number of cells and what their messages say."""
    messages_by_caveat: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for caveat in record.warnings:
            remedy = _remedy(record, caveat)
            messages_by_caveat.setdefault((caveat.code, remedy), []).append(caveat.message)
    return [
        CountedCaveat(code, len(messages), summarized(messages), remedy)
        for (code, remedy), messages in messages_by_caveat.items()
    ]


def _remedy(record: RunRecord, caveat: Caveat) -> str:
    """Return the remedy of a caveat, also of a record that was written with an earlier wording."""
    if not record.is_loop:
        return REMEDIES.get(caveat.code, caveat.remedy)
    warmup, steps = (record.config.get(name, 0) for name in ("warmup", "steps"))
    timed = len(record.measurement.timed) if record.measurement else None
    return beyond(LOOP_REMEDIES.get(caveat.code, caveat.remedy), warmup, steps, timed)


def summarized(messages: Sequence[str]) -> str:
    """Return one message for all; if texts differ only in numbers, each number becomes a range.

    Examples: `the steps span 13%` and `the steps span 8,997%` become `the steps span 13 to 8,997%`; `it waits in: loss`
    and `it waits in: loss, backward` become `it waits in: loss, backward`.
    """
    reasons: dict[tuple[str, ...], list[list[str]]] = {}  # words between the numbers → the numbers of each message
    places: dict[str, dict[str, None]] = {}  # a message up to its `in: ` → all places of the messages
    for message in messages:
        for reason in message.split("; "):
            if found := _PLACES.fullmatch(reason):
                places.setdefault(found[1], {}).update(dict.fromkeys(found[2].split(", ")))
                reasons.setdefault((found[1],), []).append([])
                continue
            reasons.setdefault(tuple(_NUMBER.split(reason)), []).append(_NUMBER.findall(reason))
    if len(reasons) > MOST_REASONS:
        return f"e.g. {messages[0]}"
    return "; ".join(
        "".join(map("".join, itertools.zip_longest(words, map(_range, zip(*numbers, strict=True)), fillvalue="")))
        + ", ".join(places.get(words[0], ()))
        for words, numbers in reasons.items()
    )


def _range(texts: Sequence[str]) -> str:
    """Return `low to high` of numbers, as they are written in the texts."""
    ordered = sorted(texts, key=lambda text: float(text.replace(",", "")))
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def _pivoted(whole: pd.DataFrame, rows: pd.DataFrame, pivot: str, notes: Sequence[str]) -> Table:
    """Return a pivot table with a column for each value of COLUMNS.

    A cell without a number shows its status; repeats show their median.
    """
    index, across, value = _parse_pivot(pivot, cols.phases_of(whole))
    _reject_mixture(rows, {s.column for s in (*index, *across)}, varying(whole)[0])
    found = cols.values(value, rows, whole)
    unit = cols.unit_for(value, found)
    keys = list(zip(*(cols.values(s, rows, whole) for s in index), strict=True))
    heads = list(zip(*(cols.values(s, rows, whole) for s in across), strict=True))
    places: dict[tuple[Any, Any], list[Any]] = {}
    for key, head, number, status in zip(keys, heads, found, rows["status"], strict=True):
        places.setdefault((key, head), []).append(status if number is None else number)
    lines = [*dict.fromkeys(keys)]
    meaning = cols.legend(value, rows)
    firsts = rows.loc[[keys.index(line) for line in lines]]
    made = cols.make([s.name for s in index], firsts, whole)
    for head in dict.fromkeys(heads):
        middle = [_middle(places.get((line, head), [])) for line in lines]
        cells = tuple(v if isinstance(v, str) else cols.text(v, unit) for v in middle)
        title = ", ".join(cols.text(v, None) for v in head)
        label = unit.label if unit else ""
        made.append(Column(title, title, label, cells, tuple(middle), numeric=True, legend=meaning))
    used = {s.column for s in (*index, *across)}
    constant = [c for c in varying(whole)[1] if c not in used]
    shown = f"{value.phase or ', '.join(cols.phases_of(rows))} {cols.title(value.column)}"
    shown += " FLOP/s" if value.column.endswith("flops_per_s") else ""  # the heading alone would be only `model`
    return Table(f"{shown} of {_caption(rows, constant, [])}", tuple(made), tuple(notes), ("ok",) * len(lines))


def _parse_pivot(pivot: str, phases: Sequence[str]) -> tuple[list[Spec], list[Spec], Spec]:
    parts = pivot.split(":")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(
            f"--pivot must be ROWS:COLUMNS:VALUE, got {pivot!r}; for example size,context_length:attention:median_ms"
        )
    rows, across = ([cols.parse(name.strip(), phases) for name in part.split(",")] for part in parts[:2])
    return rows, across, cols.parse(parts[2].strip(), phases)


def _middle(found: list[Any]) -> Any:
    """Return the (lower) median of a cell's repeats; its status if none has a number; None without such a cell."""
    numbers = sorted(v for v in found if not isinstance(v, str))
    return numbers[(len(numbers) - 1) // 2] if numbers else next(iter(found), None)


def _reject_mixture(rows: pd.DataFrame, used: set[str], apart: list[str]) -> None:
    """Raise ConfigError if cells that differ in another column would be merged; repeats of one cell may be."""
    for name in (*apart, "phase"):
        if name not in used and name != "repeat":
            measured = rows.dropna(subset=["phase"])
            if (measured.groupby(sorted(used), dropna=False)[name].nunique(dropna=False) > 1).any():
                raise ConfigError(f"--pivot would merge cells that differ in {name}; add {name} to ROWS or COLUMNS")
