"""Speed-up of FlashAttention over naive attention by batch, length, heads and embedding.

Question: by what factor is it faster, along each of four inputs, and does that factor agree with the ratio of the
    rates?
Method: batch 16, length 1024, 32 heads, embedding 2048, fp16, not causal; one input at a time is varied around
    that.
Output: times, and for each pair of cells the ratio of times, the ratio of credited rates, the ratio of peak memory.
Why: The ratio of times and the ratio of rates of the same call are the same number. Where they differ, two different
    calls were compared, so precision and credited FLOPs of each pair are checked.

    python scripts/studies/flash_attention_advantage.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import isclose
from typing import Any

from _attention import COLUMNS, PYTORCH, QUICK, by_backend, calls
from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.record import Row
from cs_systems.report.tables.records import render

BASE = AttentionShape(batch=16, heads=32, seq=1024, d_head=64)
SMALL_BASE = AttentionShape(batch=2, heads=4, seq=128, d_head=64)
INPUTS = ("batch", "heads", "seq", "d_head")


def around(base: AttentionShape, factors: tuple[float, ...]) -> list[AttentionShape]:
    """Return the base and variants with one changed input each; more heads share the same embedding."""
    embedding = base.heads * base.d_head
    shapes = [base]
    for factor in factors:
        shapes += [replace(base, batch=int(base.batch * factor)), replace(base, seq=int(base.seq * factor))]
        heads = int(base.heads * factor)
        shapes.append(replace(base, heads=heads, d_head=embedding // heads))
        shapes.append(replace(base, d_head=int(base.d_head * factor)))
    return shapes


def full() -> list[RunConfig]:
    return calls(around(BASE, (0.25, 0.5, 2, 4)))


def small() -> list[RunConfig]:
    return calls(around(SMALL_BASE, (0.5, 2)), **QUICK)


def pairs(cells: list[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Yield (naive, another backend) over the same call, at the same precision."""
    by = index(cells, "attention", "precision", *INPUTS)
    for (name, *call), cell in by.items():
        naive = by.get((PYTORCH, *call))
        if naive and name != PYTORCH:
            yield naive, cell


def ratios(cells: list[Cell]) -> list[Row]:
    rows = []
    for naive, flash in pairs(cells):
        times = naive["median_s"] / flash["median_s"]
        rates = rate(flash) / rate(naive)
        peaks = (flash["peak_allocated_bytes"], naive["peak_allocated_bytes"])
        rows.append(
            {
                "attention": flash["attention"],
                **{name: flash[name] for name in INPUTS},
                "precision": flash["precision"],
                "ratio of times": times,
                "ratio of rates": rates,
                "agree": isclose(times, rates, rel_tol=1e-6),
                "memory": None if None in peaks else f"{peaks[0] / peaks[1]:.0%}",
            }
        )
    return rows


def rate(cell: Cell) -> float:
    """Return the credited FLOPs of forward and backward over the step's median, in FLOP/s."""
    return float((cell["forward.model_flops"] + cell["backward.model_flops"]) / cell["median_s"])


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = f"{PYTORCH} over each backend, forward and backward: times, credited rates, and the share of its memory"
    return [
        render([cell.record for cell in cells], format, ("attention", *INPUTS, *COLUMNS)),
        *row_table(ratios(cells), caption, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    rows, notes = ratios(cells), []
    for name in by_backend(cells):
        same = [row for row in rows if row["attention"] == name]
        if same:
            times = [row["ratio of times"] for row in same]
            agreeing = sum(row["agree"] for row in same)
            notes.append(
                f"{name} is {min(times):.1f} to {max(times):.1f} times as fast as {PYTORCH}; the ratios of times and "
                f"of rates agree in {agreeing} of {len(same)} pairs, each at {same[0]['precision']} on both sides"
            )
            best = max(same, key=lambda row: row["ratio of times"])
            where = ", ".join(f"{input} {best[input]}" for input in INPUTS)
            notes.append(f"{name} gains most at {where}, with {best['memory'] or 'an unknown share'} of the memory")
    return notes


def varies_length_alone(cell: Cell) -> bool:
    """Return true for cells that differ from the base in length alone, which the figure shows."""
    shape = cell.record.run_config.shape
    return any(shape and replace(shape, seq=base.seq) == base for base in (BASE, SMALL_BASE))


def answer(cells: list[Cell]) -> str:
    rows, notes = ratios(cells), []
    for name in by_backend(cells):
        same = [(_axes(row), row["ratio of times"]) for row in rows if row["attention"] == name]
        gains = []
        for axis in _axes(asdict(BASE)):
            varied = sorted((at[axis], times) for at, times in same if _varies_alone(axis, at))
            if len(varied) > 1:
                (low, first), (high, last) = varied[0], varied[-1]
                gains.append(f"from {first:.1f} to {last:.1f} along {axis} {low:,} to {high:,}")
        if gains:
            notes.append(f"{', '.join(gains)} ({name})")
    return (
        f"{place(cells)}, the speed-up over {PYTORCH} in forward and backward goes {'; '.join(notes)}." if notes else ""
    )


def _axes(inputs: Mapping[str, Any]) -> dict[str, int]:
    return {
        "batch": inputs["batch"],
        "length": inputs["seq"],
        "heads": inputs["heads"],
        "embedding": inputs["heads"] * inputs["d_head"],
    }


def _varies_alone(axis: str, at: dict[str, int]) -> bool:
    bases = [_axes(asdict(base)) for base in (BASE, SMALL_BASE)]
    return any(base | {axis: at[axis]} == at for base in bases)


STUDY = Study(
    __file__,
    __doc__,
    "How does FlashAttention's advantage depend on batch, length, heads and embedding?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
    drawn=varies_length_alone,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
