"""Counters of an ncu report, as three tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cs_systems.cli._tables import Part, document_text, table_text
from cs_systems.core.rows import Row

# Caption → (columns of `traces.ncu` with their headings, their meaning).
SHOWN: dict[str, tuple[dict[str, str], str]] = {
    "occupancy and efficiency": (
        {
            "kernel": "kernel", "inside": "inside", "time_s": "time", "occupancy_share": "occupancy",
            "highest_occupancy_share": "at most", "sm_efficiency_share": "SM eff.",
            "warp_efficiency_share": "warp eff.",
        },
        "occupancy: active warps over the most that an SM can hold; at most: the occupancy that registers and shared "
        "memory allow; SM eff.: share of the time in which an SM has an active warp; warp eff.: active threads of an "
        "instruction, over 32",
    ),
    "throughput": (
        {
            "kernel": "kernel", "sm_share": "SM", "memory_share": "memory", "dram_share": "DRAM",
            "dram_read_bytes_per_s": "read", "dram_write_bytes_per_s": "written", "load_bytes_per_s": "load",
            "store_bytes_per_s": "store",
        },
        "SM, memory, DRAM: share of the peak throughput; read, written: DRAM traffic; load, store: traffic of global "
        "memory instructions",
    ),
    "shared memory": (
        {
            "kernel": "kernel", "registers": "regs", "shared_bytes": "per block", "shared_load_bytes_per_s": "load",
            "shared_store_bytes_per_s": "store", "shared_load_conflicts": "ld conflicts",
            "shared_store_conflicts": "st conflicts",
        },
        "regs: registers per thread; per block: shared memory; ld, st conflicts: additional wavefronts because of bank "
        "conflicts; load, store: upper limit, at 128 bytes per wavefront",
    ),
}  # fmt: skip
ALONE = "ncu runs each kernel several times, alone and with cold caches; do not use these times as timings"


def counters_text(heading: str, rows: Sequence[Row], format: str = "terminal", output: Path | None = None) -> list[str]:
    """Return the rows of `traces.ncu.read` as tables, with only the innermost range, or as one full CSV table.

    A table without any of its metrics is left out, with a note.
    """
    if format == "csv":
        return [table_text("", rows, {}, (), format)]
    readable = [{**row, "inside": row["ranges"].rpartition(" > ")[2] or None} for row in rows]
    measured = {name for row in rows for name, value in row.items() if value is not None} - {"kernel", "ranges"}
    lacking = [caption for caption, (titles, _) in SHOWN.items() if measured.isdisjoint(titles)]
    notes = [f"no metric of {', '.join(lacking)} was recorded; record with ncu --set full"] if lacking else []
    parts: list[Part] = [
        (caption, readable, titles, [note]) for caption, (titles, note) in SHOWN.items() if caption not in lacking
    ]
    return document_text(format, [heading, ALONE, *notes], parts, output)
