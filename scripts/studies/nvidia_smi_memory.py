"""Difference between nvidia-smi's memory and memory_allocated, by owner.

Question: what lies between the bytes that tensors have and the bytes that nvidia-smi shows?
Method: two training steps of small, medium, large and xl at context 512, in fp32 and bf16, each in a process of its
    own; memory is read at each phase's boundary, and at the end what is in use is divided into tensors, cuBLAS
    workspaces (found by giving them back), the allocator's rounding, its cache, the CUDA context.
Output: the parts with their sums, by cell; allocated, reserved and in use after each phase.
Why: nvidia-smi and torch.cuda.memory_allocated disagree by GiB. Each part of the difference has a name and bytes.

    python scripts/studies/nvidia_smi_memory.py
"""

from __future__ import annotations

from collections.abc import Sequence

from _cells import Cell, place
from _study import Study, row_table, run

from cs_systems.config import Precision, RunConfig, grid
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = RunConfig(profiler="memory", warmup=0, steps=2)
PRECISIONS = (Precision.FP32, Precision.BF16)
COLUMNS = (
    "size",
    "context_length",
    "precision",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "predicted_peak_gib",
    "note",
)
PHASES = ("size", "precision", "step", "phase", "allocated_bytes", "reserved_bytes", "device_used_bytes")


def full() -> list[RunConfig]:
    return grid(BASE, size=("small", "medium", "large", "xl"), context_length=(512,), precision=PRECISIONS)


def small() -> list[RunConfig]:
    return grid(BASE, size=("tiny",), context_length=(64,), precision=PRECISIONS)


def parts(cells: Sequence[Cell]) -> list[Row]:
    """Return a row for each part, a column for each cell."""
    with_parts = [cell for cell in cells if cell.record.results.get("memory_parts")]
    if not with_parts:
        return []
    rows = []
    for number, first in enumerate(with_parts[0].record.results["memory_parts"]):
        row: Row = {"part": f"= {first['part']}" if first["total"] else first["part"]}
        for cell in with_parts:
            name = f"{cell['size']} {cell['precision']}_bytes"
            row[name] = cell.record.results["memory_parts"][number]["bytes"]
        rows.append(row)
    return rows


def phases(cells: Sequence[Cell]) -> list[Row]:
    return [
        {"size": cell["size"], "precision": cell["precision"]} | {k: row[k] for k in PHASES[2:]}
        for cell in cells
        for row in cell.record.results.get("memory_phases", ())
        if row["allocated_bytes"] is not None
    ]


def tables(cells: list[Cell], format: str) -> list[str]:
    return [
        render([cell.record for cell in cells], format, COLUMNS),
        *row_table(parts(cells), "device memory by owner after two steps; =: subtotal", format),
        *row_table(phases(cells), "allocated, reserved and in use after each phase", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    for cell in cells:
        found = {row["part"]: row["bytes"] for row in cell.record.results.get("memory_parts", ())}
        used, allocated = found.get("in use by cudaMemGetInfo"), found.get("memory_allocated")
        if used is None or allocated is None:
            continue
        between = {
            name: size for name, size in found.items()
            if name.startswith(("cache", "context", "other")) and size
        }  # fmt: skip
        listed = ", ".join(f"{name} {human(size, 'bytes')}" for name, size in between.items())
        notes.append(
            f"{cell.label('attention', 'profiler')}: {human(used - allocated, 'bytes')} in use beyond "
            f"memory_allocated: {listed}"
        )
    measured = sum(cell.measured for cell in cells)
    if measured and not notes:
        notes.append(f"none of {measured} cells ran on a GPU, so the owners of device memory are unknown")
    return notes


def answer(cells: list[Cell]) -> str:
    more, cache, context = [], [], []
    for cell in cells:
        found = {row["part"]: row["bytes"] or 0 for row in cell.record.results.get("memory_parts", ())}
        if used := found.get("in use by cudaMemGetInfo"):
            more.append(used - found["memory_allocated"])
            cache.append(sum(size for name, size in found.items() if name.startswith("cache")))
            context.append(found["context and modules"])
    if not more:
        return ""
    parts = [f"{human(max(cache), 'bytes')} of cache", f"{human(max(context), 'bytes')} of CUDA context and modules"]
    return (
        f"{place(cells)}, {human(min(more), 'bytes')} to {human(max(more), 'bytes')} more are in use after two steps "
        f"than memory_allocated counts: up to {' and '.join(parts)}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "Why does nvidia-smi show more memory than memory_allocated, and whose is the difference?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="memory",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
