"""Time of attention with and without a causal mask.

Question: causal attention asks for half of the scores; which implementation does half of the work?
Method: batch 32, 32 heads, embedding 2048 (d_head 64), fp16, lengths 8 … 512 and 2048, with and without the mask.
Output: times, and credited FLOPs (by formula) next to executed FLOPs (what the tiles compute).
Why: The formula credits a causal call with half of the FLOPs, by convention. What is executed falls only where whole
    tiles are skipped. Both rates stand side by side.

    python scripts/studies/attention_causal_mask.py
"""

from __future__ import annotations

from _attention import COLUMNS, QUICK, by_backend, calls, executed_rows, rate
from _cells import Cell, place
from _study import Study, index, row_table, run
from attention_sequence_length import LENGTHS

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.report.tables.records import render


def full() -> list[RunConfig]:
    return calls([AttentionShape(32, 32, seq, 64, causal) for causal in (False, True) for seq in (*LENGTHS, 2048)])


def small() -> list[RunConfig]:
    return calls([AttentionShape(2, 2, seq, 64, causal) for causal in (False, True) for seq in (64, 512)], **QUICK)


def tables(cells: list[Cell], format: str) -> list[str]:
    rows = executed_rows(cells, "attention", "seq", "causal")
    return [
        render([cell.record for cell in cells], format, ("attention", "seq", "causal", *COLUMNS)),
        *row_table(rows, "forward: credited by formula (causal halved) beside executed (tiles, padding)", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    by = index(cells, "attention", "seq", "causal")
    notes = []
    for name in by_backend(cells):
        seq = max(cell["seq"] for cell in by_backend(cells)[name])
        whole, half = by.get((name, seq, False)), by.get((name, seq, True))
        if whole and half:
            time, credited, executed = (
                half[f"forward.{column}"] / whole[f"forward.{column}"]
                for column in ("median_s", "model_flops", "hardware_flops")
            )
            notes.append(
                f"{name} at length {seq}: causal is credited with {credited:.2f} of the FLOPs, executes {executed:.2f} "
                f"and takes {time:.2f} times as long: by credit {rate(whole)} become {rate(half)}, by execution "
                f"{rate(whole, 'hardware')} become {rate(half, 'hardware')}"
                + ("; the mask is one more pass over the whole score matrix" if executed == 1 < time else "")
            )
    return notes


def answer(cells: list[Cell]) -> str:
    by = index(cells, "attention", "seq", "causal")
    longest = max((seq for _, seq, _ in by), default=0)
    ratios = {
        name: by[name, longest, True]["forward.median_s"] / by[name, longest, False]["forward.median_s"]
        for name in by_backend(cells)
        if (name, longest, True) in by and (name, longest, False) in by
    }
    if not ratios:
        return ""
    text = ", ".join(f"{value:.2f} ({name})" for name, value in ratios.items())
    return f"{place(cells)}, at length {longest:,} a causal mask multiplies the time of forward by {text}."


STUDY = Study(__file__, __doc__, "What does a causal mask save?", full, small, tables, explain, answer, figure="time")

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
