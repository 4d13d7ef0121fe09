"""Counters of an ncu report, as three tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cs_systems.cli._tables import Section, document_text, table_text
from cs_systems.core.tables import Row, Table
from cs_systems.readers.ncu import COUNTERS, CounterRow


class InsideRow(CounterRow):
    """Launch with the innermost range that was open."""

    inside: str | None


TABLES = (
    Table(
        "occupancy",
        InsideRow,
        "occupancy and efficiency",
        "kernel inside time_s occupancy_share highest_occupancy_share sm_efficiency_share warp_efficiency_share",
        notes=(
            "occupancy: active warps over the most that an SM can hold; at most: the occupancy that registers and "
            "shared memory allow; SM eff.: share of the time in which an SM has an active warp; warp eff.: active "
            "threads of an instruction, over 32",
        ),
    ),
    Table(
        "throughput",
        InsideRow,
        "throughput",
        "kernel sm_share memory_share dram_share dram_read_bytes_per_s dram_write_bytes_per_s load_bytes_per_s "
        "store_bytes_per_s",
        notes=(
            "SM, memory, DRAM: share of the peak throughput; read, written: DRAM traffic; load, store: traffic of "
            "global memory instructions",
        ),
    ),
    Table(
        "shared_memory",
        InsideRow,
        "shared memory",
        "kernel registers shared_bytes shared_load_bytes_per_s shared_store_bytes_per_s shared_load_conflicts "
        "shared_store_conflicts",
        notes=(
            "regs: registers per thread; per block: shared memory; ld, st conflicts: additional wavefronts because of "
            "bank conflicts; load, store: upper limit, at 128 bytes per wavefront",
        ),
    ),
)
ALONE = "ncu runs each kernel several times, alone and with cold caches; do not use these times as timings"


def counters_text(heading: str, rows: Sequence[Row], format: str = "terminal", output: Path | None = None) -> list[str]:
    """Return the rows of `readers.ncu.read` as tables, with only the innermost range, or as one full CSV table.

    A table without any of its metrics is left out, with a note.
    """
    if format == "csv":
        return [table_text(COUNTERS, rows, format=format)]
    readable = [{**row, "inside": row["ranges"].rpartition(" > ")[2] or None} for row in rows]
    measured = {name for row in rows for name, value in row.items() if value is not None} - {"kernel", "ranges"}
    lacking = [table.caption for table in TABLES if measured.isdisjoint(table.titles)]
    notes = [f"no metric of {', '.join(lacking)} was recorded; record with ncu --set full"] if lacking else []
    sections: list[Section] = [(table, readable, []) for table in TABLES if table.caption not in lacking]
    return document_text(format, [heading, ALONE, *notes], sections, output)
