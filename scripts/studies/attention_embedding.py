"""Time of attention over embedding sizes, at a fixed number of heads.

Question: from embedding 32 to 2048 at 32 heads (d_head 1 … 64) the work grows 64 times; why is the time flat at
    first?
Method: batch 32, 32 heads, length 1024, causal, fp16; forward and backward.
Output: times, and for each cell the head size that the kernel computes with, credited and executed FLOPs.
Why: Kernels exist for a few head sizes: a smaller head is padded and runs through the next larger one.

    python scripts/studies/attention_embedding.py
"""

from __future__ import annotations

from _attention import COLUMNS, QUICK, by_backend, calls, executed_rows, speed_up
from _cells import Cell, place
from _study import Study, row_table, run

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.report.tables.records import render

HEADS = 32
EMBEDDINGS = (32, 64, 128, 256, 512, 1024, 2048)


def full() -> list[RunConfig]:
    return calls([AttentionShape(32, HEADS, 1024, emb // HEADS, causal=True) for emb in EMBEDDINGS])


def small() -> list[RunConfig]:
    return calls([AttentionShape(1, 2, 256, emb // HEADS, causal=True) for emb in EMBEDDINGS], **QUICK)


def tables(cells: list[Cell], format: str) -> list[str]:
    rows = executed_rows(cells, "attention")
    return [
        render([cell.record for cell in cells], format, ("attention", "d_head", *COLUMNS)),
        *row_table(rows, "forward: the head size that was asked for and the one computed with", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    for name, same in by_backend(cells).items():
        first, last = same[0], same[-1]
        credited, executed, moved, time = (
            last[f"forward.{column}"] / first[f"forward.{column}"]
            for column in ("model_flops", "hardware_flops", "bytes", "median_s")
        )
        notes.append(
            f"{name}: at d_head {last['d_head']} forward takes {time:.1f} times as long as at {first['d_head']}, "
            f"for {credited:.0f} times the credited FLOPs, {executed:.1f} the executed, {moved:.1f} the bytes"
        )
        padded = [cell for cell in same if cell["executed_d_head"] and cell["executed_d_head"] > cell["d_head"]]
        if padded:
            heads = ", ".join(f"{cell['d_head']} as {cell['executed_d_head']}" for cell in padded)
            notes.append(f"{name}: padded heads: {heads}")
    return [*notes, *speed_up(cells, "d_head")]


def answer(cells: list[Cell]) -> str:
    lines = {name: same for name, same in by_backend(cells).items() if len(same) > 1}
    if not lines:
        return ""
    first, *_, last = next(iter(lines.values()))
    times = {name: same[-1]["forward.median_s"] / same[0]["forward.median_s"] for name, same in lines.items()}
    text = ", ".join(f"{ratio:.1f} ({name})" for name, ratio in times.items())
    more = last["forward.model_flops"] / first["forward.model_flops"]
    return (
        f"{place(cells)}, from head size {first['d_head']} to {last['d_head']} the credited FLOPs of forward grow "
        f"{more:.0f} times and its time {text} times."
    )


STUDY = Study(
    __file__,
    __doc__,
    "How does attention's time depend on the embedding, at a fixed number of heads?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
