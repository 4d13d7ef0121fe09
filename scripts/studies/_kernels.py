"""Kernel times for studies: cells that are measured a second time, under a profiler.

A profiled cell gives the kernels and their times. The time of a step comes only from its clean twin, which differs in
the profiler and the number of steps, warm-up and rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _cells import CLEAN

from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.record import RECORDS_FILE, Row, read_records

if TYPE_CHECKING:
    from _cells import Cell

WARMUP, STEPS = 5, 3  # number of profiled steps of a cell: kernels of a steady step take the same time in each step
ALL = "all"
# Tables that a study of phases does not show: half of a profile's bytes.
BY_KERNEL_AND_LAYER = ("kernels", "layers", "parts", "attention", "ranges")
ON_A_CPU = "kernel times require a GPU; on a CPU, only the times by the clock are shown"


def profiled(configs: Iterable[RunConfig], profiler: str) -> list[RunConfig]:
    """Return the same cells under a profiler."""
    return [replace(c, profiler=profiler, warmup=WARMUP, steps=STEPS) for c in configs]


def possible(configs: Sequence[RunConfig]) -> tuple[list[RunConfig], list[str]]:
    """Return the cells with a profiler that works here, clean ones first, and the reason for each other profiler."""
    problems = {name: plugins.get("profilers", name).problem() for name in {c.profiler for c in configs}}
    fine = [c for c in configs if problems[c.profiler] is None]
    left_out = [
        f"{sum(c.profiler == name for c in configs)} cells under {name} are left out: {why}"
        for name, why in problems.items()
        if why
    ]
    return sorted(fine, key=lambda c: c.profiler != CLEAN), left_out


def drop_tables(folder: Path, names: Collection[str]) -> None:
    """Remove these tables from the folder's profiles; a file with a torn line stays as it is, for inspection."""
    records, complaints = read_records(folder)
    if complaints or not any(set(names) & set(record.results) for record in records):
        return
    kept = [replace(r, results={name: rows for name, rows in r.results.items() if name not in names}) for r in records]
    made = folder / f"{RECORDS_FILE}.new"
    made.write_text("".join(record.to_json() + "\n" for record in kept), encoding="utf-8")
    made.replace(folder / RECORDS_FILE)


def clean(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells with times that count as timings."""
    return [cell for cell in cells if not cell.profiled]


def twins(cells: Iterable[Cell]) -> dict[RunConfig, Cell]:
    """Return a mapping from the measured configuration to its profiled cell, where that has tables of kernels."""
    return {_as_clean(cell.record.run_config): cell for cell in cells if cell.profiled and _has_phases(cell)}


def twin(cell: Cell, found: Mapping[RunConfig, Cell]) -> Cell | None:
    return found.get(_as_clean(cell.record.run_config))


def _has_phases(cell: Cell) -> bool:
    return cell.measured and bool(cell.record.results.get("phases"))


def _as_clean(config: RunConfig) -> RunConfig:
    return replace(config, profiler=CLEAN, profiler_args=(), warmup=0, steps=1, rounds=1)


def add_kernel_times(cells: Sequence[Cell]) -> None:
    """Add the columns of `kernel_columns` to each cell that was measured both clean and profiled."""
    found = twins(cells)
    for cell in clean(cells):
        if cell.measured and (other := twin(cell, found)):
            cell.columns.update(kernel_columns(cell, other))


def kernel_columns(cell: Cell, other: Cell) -> Row:
    """Return the kernel columns of one step.

    They are `forward.kernel_s` and so on, `kernel_s` of all phases, `kernels` (their number), `kernel_ratio` (backward
    over forward), and `busy_share` (time of all kernels over that of the clean step).
    """
    times = phase_times(other)
    forward, backward = times.get("forward"), times.get("backward")
    whole = sum(times.values())
    return {
        **{f"{phase}.kernel_s": time for phase, time in times.items()},
        "kernel_s": whole,
        "kernels": round(sum(r["calls_per_step"] for r in other.record.results["phases"] if r["family"] == ALL)),
        "kernel_ratio": backward / forward if forward and backward else None,
        "busy_share": whole / cell["median_s"],
    }


def phase_times(cell: Cell) -> dict[str, float]:
    """Return the time of the kernels in one step by phase."""
    return {row["phase"]: row["time_s"] for row in cell.record.results["phases"] if row["family"] == ALL}


def family_times(cell: Cell) -> dict[str, float]:
    """Return the time of the kernels in one step by family, the longest first."""
    return {row["family"]: row["time_s"] for row in cell.record.results["families"]}


def kernel_rows(cell: Cell, family: str | None = None) -> list[Row]:
    """Return the kernels of a step (of a family), the longest first."""
    return [row for row in cell.record.results["kernels"] if family in (None, row["family"])]


def idle_shares(cell: Cell) -> dict[str, float]:
    """Return the share of the profiled step in which the first GPU ran no kernel, by cause."""
    return {row["cause"]: row["share"] for row in cell.record.results["gaps"] if row["device"] == 0}


def step_median(cell: Cell, column: str) -> float:
    """Return the median of a column of the table `steps`."""
    return float(median(row[column] for row in cell.record.results["steps"]))


def unknown(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the reasons for missing kernel times: a CPU's trace has none, and a profiled cell may have failed."""
    ran_on = {cell.record.environment.device for cell in cells if cell.measured and cell.record.environment}
    if ran_on == {"cpu"}:
        yield ON_A_CPU
    failed = [cell.record for cell in cells if cell.profiled and not cell.measured]
    for (status, reason), count in Counter((record.status, record.reason) for record in failed).items():
        which = "1 profiled cell has" if count == 1 else f"{count} profiled cells have"
        yield f"{which} no kernel times: {status}{f' ({reason})' if reason else ''}"


def one(rows: Iterable[Row], **is_: Any) -> Row | None:
    """Return the first row with these values."""
    return next((row for row in rows if all(row[name] == value for name, value in is_.items())), None)
