"""Cost of an all-reduce by its size and the number of ranks, apart from the start of the ranks.

Question: what does a call take from 1 MiB to 1 GiB and on 1 to 6 ranks, what is paid once, and what would one
    stopwatch around both have shown?
Method: fp32 all-reduce of 1 MB to 1 GiB on 1, 2, 4 and 6 ranks, where there are as many devices; after warm-up at the
    same size, as the median of the slowest rank, from when all have met. The start of a rank's process,
    init_process_group and the first call of each size are timed apart, as is the meeting, in which ranks wait for the
    last one.
Output: set-up, first call and a steady call side by side, with algbw and busbw as nccl-tests has them, and the link's
    rate; t(n) = α + n/β with its quality. Figure: time and busbw against size.
Why: A stopwatch around set-up and call reads seconds that are the same for every size and hide what a size costs.

    python scripts/studies/all_reduce.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from _cells import Cell, place
from _numerics import not_measured
from _study import Study, row_table, run

from cs_systems.config import RunConfig
from cs_systems.core.collectives import CollectiveShape, calls_for, readable_bytes
from cs_systems.core.units import human, significant
from cs_systems.record import Row
from cs_systems.report import collectives

MIB = 2**20
# Powers of four for the fit, and the decimal sizes that courses ask for.
FULL = tuple(sorted({*(4**k * MIB for k in range(6)), *(10**k for k in range(6, 10))}))
SMALL = tuple(4**k * MIB for k in range(5))


def cells(sizes: Sequence[int], worlds: Sequence[int], steps: int) -> list[RunConfig]:
    base = RunConfig(workload="collective", collective=CollectiveShape(), warmup=3, steps=steps)
    return [
        replace(base, collective=CollectiveShape("all_reduce", size, "fp32", calls_for(size)), world_size=ranks)
        for ranks in worlds
        for size in sizes
    ]


def full() -> list[RunConfig]:
    return cells(FULL, (1, 2, 4, 6), steps=10)


def small() -> list[RunConfig]:
    return cells(SMALL, (1, 2, 4), steps=5)


def tables(cells: list[Cell], format: str) -> list[str]:
    measured = [cell for cell in cells if cell.measured]
    return [
        *not_measured(cells, format),
        *row_table(_known([_row(c) for c in measured]), "all-reduce, fp32: times of the set-up, and per call", format),
        *row_table(collectives.fits(c.record for c in measured), "t(n) = α + n/β, by relative residuals", format),
    ]


def _row(cell: Cell) -> Row:
    return {
        "ranks": cell["world_size"],
        "size": readable_bytes(cell["size_bytes"]),
        "start_s": cell["start_s"],
        "init_s": cell["init_process_group_s"],
        "first_call_s": cell["first_call_s"],
        "call_s": cell["call_s"],
        "skew_s": cell["skew.median_s"],
        "one_stopwatch_s": _one_stopwatch_s(cell),
        "algbw_bytes_per_s": cell["algbw_bytes_per_s"],
        "busbw_bytes_per_s": cell["busbw_bytes_per_s"],
        "of_link_share": cell["link_share"],
    }


def _known(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without columns that are None in all rows, such as the link between ranks on a CPU."""
    return [{name: row[name] for name in row if any(r[name] is not None for r in rows)} for row in rows]


def _one_stopwatch_s(cell: Cell) -> float | None:
    """Return the seconds from the start of the ranks to the end of their first call, and of one more call."""
    parts = [cell[name] for name in ("start_s", "init_process_group_s", "first_call_s", "call_s")]
    return None if None in parts else sum(parts)


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    by_ranks: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell.measured:
            by_ranks.setdefault(cell["world_size"], []).append(cell)
    for ranks, found in by_ranks.items():
        found.sort(key=lambda cell: cell["size_bytes"])
        notes += _set_up(ranks, found) if len(found) > 1 else []
    notes += [_fit(row) for row in collectives.fits(c.record for c in cells)]
    if several := [found[-1] for ranks, found in by_ranks.items() if ranks > 1]:
        notes.append(_busbw(several))
    return notes


def _set_up(ranks: int, found: Sequence[Cell]) -> list[str]:
    """Return a sentence that compares the time of one stopwatch reading with the time of a call."""
    first, last = found[0], found[-1]
    sizes = f"from {readable_bytes(first['size_bytes'])} to {readable_bytes(last['size_bytes'])}"
    a_call = f"a call takes {human(first['call_s'], 's')} to {human(last['call_s'], 's')}, "
    a_call += f"{significant(last['call_s'] / first['call_s'], 2)} times as much"
    whole = [_one_stopwatch_s(cell) for cell in (first, last)]
    if whole[0] is None or whole[1] is None:
        return [f"{_ranks(ranks)}, {sizes}: {a_call}"]
    flat = f"{whole[0]:.2f} s to {whole[1]:.2f} s, {significant(whole[1] / whole[0], 2)} times as much"
    return [f"{_ranks(ranks)}, {sizes}: {a_call}; one stopwatch around start, init, first call and a call reads {flat}"]


def _fit(row: Row) -> str:
    """Return the fitted line as a sentence, and whether it is valid between the measured sizes."""
    bandwidth = row["algbw_bytes_per_s"]
    line = f"α {human(row['latency_s'], 's')}" if row["latency_s"] else "α too small for these sizes to show"
    line += f", β {human(bandwidth, 'bytes_per_s')} (algbw)" if bandwidth else ", no growth with the size"
    worst = row["worst_residual_share"]
    fits = "" if worst <= 0.1 else ": one line does not fit all sizes"
    quality = "" if row["r_squared"] is None else f"R² {row['r_squared']:.3f}, "
    return f"{_ranks(row['world_size'])}: {line}; {quality}at worst {worst:.0%} off{fits}"


def _busbw(largest: Sequence[Cell]) -> str:
    parts = []
    for cell in largest:
        share = "" if cell["link_share"] is None else f", {cell['link_share']:.0%} of the link"
        parts.append(f"{human(cell['busbw_bytes_per_s'], 'bytes_per_s')} on {_ranks(cell['world_size'])}{share}")
    return f"busbw at {readable_bytes(largest[0]['size_bytes'])}: {'; '.join(parts)}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def answer(cells: list[Cell]) -> str:
    notes = []
    for ranks in dict.fromkeys(cell["world_size"] for cell in cells if cell.measured and cell["world_size"] > 1):
        same = [cell for cell in cells if cell.measured and cell["world_size"] == ranks]
        by_size = sorted(same, key=lambda cell: int(cell["size_bytes"]))
        ends = [by_size[0], by_size[-1]]
        calls = [f"{human(cell['call_s'], 's')} for {readable_bytes(cell['size_bytes'])}" for cell in ends]
        start = f", after {same[0]['start_s']:.2f} s to start the processes" if same[0]["start_s"] else ""
        notes.append(f"on {_ranks(ranks)} an all-reduce takes {' and '.join(dict.fromkeys(calls))}{start}")
    return f"{place(cells)}: {'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "What does an all-reduce cost by its size and the number of ranks, and what by starting the ranks?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="collectives",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
