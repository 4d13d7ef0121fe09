"""Time of attention over numbers of heads, at a fixed embedding.

Question: with embedding 32 split over 1 … 16 heads the formula's FLOPs stay the same; why does TFLOP/s fall as
    1/heads?
Method: batch 32, embedding 32, length 1024, fp16, not causal; d_head = 32 / heads.
Output: times, peak memory, and credited next to executed FLOPs with the padded head size.
Why: The work is the score matrices, one per head: each head computes them over the whole length, however small it is.

    python scripts/studies/attention_heads.py
"""

from __future__ import annotations

from _attention import COLUMNS, QUICK, by_backend, calls, executed_rows, exponent, rate
from _cells import Cell, place
from _study import Study, row_table, run

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.core.units import human
from cs_systems.report.tables.records import render

EMBEDDING = 32
HEADS = (1, 2, 4, 8, 16)


def full() -> list[RunConfig]:
    return calls([AttentionShape(32, heads, 1024, EMBEDDING // heads) for heads in HEADS])


def small() -> list[RunConfig]:
    return calls([AttentionShape(2, heads, 256, EMBEDDING // heads) for heads in HEADS], **QUICK)


def tables(cells: list[Cell], format: str) -> list[str]:
    rows = executed_rows(cells, "attention", "heads")
    return [
        render([cell.record for cell in cells], format, ("attention", "heads", "d_head", *COLUMNS)),
        *row_table(rows, f"forward at embedding {EMBEDDING}: credited beside executed FLOPs", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    for name, same in by_backend(cells).items():
        if len(same) < 2:
            continue
        first, last = same[0], same[-1]
        heads = [cell["heads"] for cell in same]
        falls = exponent(heads, [cell["forward.model_flops_per_s"] for cell in same])
        executed = last["forward.hardware_flops"] / first["forward.hardware_flops"]
        notes.append(
            f"{name}: from {heads[0]} to {heads[-1]} heads the credited rate falls as heads^{falls:.2f} ({rate(first)} "
            f"to {rate(last)}), with {heads[-1] // heads[0]} times the rows of softmax and {executed:.1f} times the "
            f"executed FLOPs, whose rate goes from {rate(first, 'hardware')} to {rate(last, 'hardware')}"
        )
        peaks = [cell["peak_allocated_bytes"] or cell["predicted_peak_bytes"] for cell in (first, last)]
        if all(peaks):
            kind = "peak memory" if first["peak_allocated_bytes"] else "predicted peak memory"
            notes.append(f"{name}: {kind} goes from {human(peaks[0], 'bytes')} to {human(peaks[1], 'bytes')}")
    return notes


def answer(cells: list[Cell]) -> str:
    lines = {name: same for name, same in by_backend(cells).items() if len(same) > 1}
    if not lines:
        return ""
    ratios = [f"{same[-1]['median_s'] / same[0]['median_s']:.1f} ({name})" for name, same in lines.items()]
    heads = [cell["heads"] for cell in next(iter(lines.values()))]
    return (
        f"{place(cells)}, at a fixed embedding of {EMBEDDING}, {heads[-1]} heads take {', '.join(ratios)} times "
        f"as long as {heads[0]} over forward and backward, for the same credited FLOPs."
    )


STUDY = Study(
    __file__,
    __doc__,
    "What do more heads cost at a fixed embedding?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
