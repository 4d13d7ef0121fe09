"""Time and memory of a training step under each form of activation checkpointing.

Question: what do checkpoints of 1, 2, 4 and 8 blocks, nested ones and selective ones save in memory, and what do they
    cost in time?
Method: a training step of xl and xl-2026 at context 2048, batch 4, bf16, sdpa_flash, under each; peak memory and time
    next to the prediction of both: bytes by the closed form, FLOPs that are executed again.
Output: peak and step time by checkpoint; what was saved and what it cost; the best group by prediction and as measured.
Why: The best group size can be computed beforehand; the measurement checks the computation.

    python scripts/studies/activation_checkpointing.py
"""

from __future__ import annotations

from collections.abc import Sequence

from _cells import Cell, place
from _study import Study, bounded, index, row_table, run

from cs_systems.config import Precision, RunConfig, grid
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = RunConfig(attention="sdpa_flash", precision=Precision.BF16, warmup=2, steps=5)
GROUPS = ("every:1", "every:2", "every:4", "every:8")
CHECKPOINTS = ("none", *GROUPS, "nested:8:2", "nested:16:4", "selective:attention", "selective:matmul")
COLUMNS = ("size", "checkpoint", "forward.median_ms", "backward.median_ms", "median_ms", "peak_allocated_gib", "note")


def full() -> list[RunConfig]:
    return bounded(grid(BASE, size=("xl", "2.7B"), context_length=(2048,), checkpoint=CHECKPOINTS))


def small() -> list[RunConfig]:
    return grid(
        BASE, size=("tiny",), num_layers=(8,), checkpoint=("none", "every:1", "every:4", "nested:4:2"), steps=[3]
    )


def trades(cells: Sequence[Cell]) -> list[Row]:
    """Return for each checkpoint the memory that it saves, and the FLOPs and time that it costs."""
    by, rows = index(cells, "size", "checkpoint"), []
    for (size, checkpoint), cell in by.items():
        if (plain := by.get((size, "none"))) is None:
            continue
        measured, predicted = cell["peak_allocated_bytes"], cell["predicted_peak_bytes"]
        rows.append(
            {
                "size": size,
                "checkpoint": checkpoint,
                "measured_bytes": measured,
                "predicted_bytes": predicted,
                "off": f"{predicted / measured - 1:+.2%}" if measured and predicted else "–",
                "executed FLOPs": f"{cell['hardware_flops'] / plain['hardware_flops'] - 1:+.1%}"
                if plain["hardware_flops"]
                else "–",
                "time": f"{cell['median_s'] / plain['median_s'] - 1:+.1%}",
            }
        )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "against no checkpoint: FLOPs and time; the peak as measured and as predicted"
    return [render([c.record for c in cells], format, COLUMNS), *row_table(trades(cells), caption, format)]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    by = index(cells, "size", "checkpoint")
    for size in dict.fromkeys(size for size, _ in by):
        same = {checkpoint: cell for (s, checkpoint), cell in by.items() if s == size}
        groups = {name: cell for name, cell in same.items() if name.startswith("every:")}
        for what, column in (("predicted", "predicted_peak_bytes"), ("measured", "peak_allocated_bytes")):
            known = {name: cell[column] for name, cell in groups.items() if cell[column]}
            if known:
                best = min(known, key=lambda name: known[name])
                notes.append(
                    f"{size}: among equal groups, {best} needs the least memory, {what}: {human(known[best], 'bytes')}"
                )
        notes += _prices(size, same)
        if waits := [name for name, cell in same.items() if "launch-bound" in {w.code for w in cell.record.warnings}]:
            notes.append(
                f"{size}: launch-bound under {', '.join(waits)}: each checkpoint adds calls, and a selective one runs "
                "Python code for every operator"
            )
    return notes


def _prices(size: str, same: dict[str, Cell]) -> list[str]:
    """Return a sentence on the checkpoint that saves most memory, and its cost in time."""
    plain = same.get("none")
    if plain is None:
        return []
    column = next((c for c in ("peak_allocated_bytes", "predicted_peak_bytes") if plain[c]), None)
    left = {n: cell[column] for n, cell in same.items() if column and n != "none" and cell[column]}
    if not left:
        return []
    least = min(left, key=lambda name: left[name])
    whole, slower = plain[column], same[least]["median_s"] / plain["median_s"] - 1
    saved, known = 1 - left[least] / whole, "measured" if column == "peak_allocated_bytes" else "predicted"
    of = f"{human(whole, 'bytes')} ({known})"
    rest = human(left[least], "bytes")
    return [f"{size}: {least} saves the most, {saved:.0%} of {of}: {rest} remain, for {slower:+.1%} of the time"]


def _blocks(group: str) -> str:
    count = int(group.removeprefix("every:"))
    return f"{count} {'block' if count == 1 else 'blocks'} a checkpoint"


def answer(cells: list[Cell]) -> str:
    by, notes = index(cells, "size", "checkpoint"), []
    for size in dict.fromkeys(size for size, _ in by):
        plain, groups = by.get((size, "none")), {g: by[size, g] for g in GROUPS if (size, g) in by}
        column = "peak_allocated_bytes" if plain and plain["peak_allocated_bytes"] else "predicted_peak_bytes"
        if plain is None or not groups or not plain[column]:
            continue
        best = min(groups, key=lambda name: groups[name][column])
        slower = groups[best]["median_s"] / plain["median_s"] - 1
        which = "" if column == "peak_allocated_bytes" else " as predicted"
        notes.append(
            f"{size} needs the least memory with {_blocks(best)}, {human(groups[best][column], 'bytes')} instead of "
            f"{human(plain[column], 'bytes')}{which}, for {slower:+.1%} of the time"
        )
    return f"{place(cells)}, among equal groups: {'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "How many blocks should one activation checkpoint cover?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="phases",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
