"""Longest attention call that fits into 8 GiB and 24 GiB, by implementation.

Question: at which length does each implementation run out of memory on 8 GiB and on 24 GiB, and what was it asking
    for?
Method: batch 32, 32 heads, embedding 2048 (d_head 64), causal, fp16, lengths 512 … 4096; the smaller cards are
    emulated by a cap on this process's memory, and the cap stands in each row. Where there is no GPU, by prediction
    alone.
Output: a row for each cell that fits and for each that does not: predicted peak, measured peak, the allocation that
    failed.
Why: Running out of memory is a result, with the predicted bytes and what fills the memory.

    python scripts/studies/attention_out_of_memory.py
"""

from __future__ import annotations

from _attention import PYTORCH, QUICK, by_backend, calls
from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

GIB = 2**30
LIMITS = (8 * GIB, 24 * GIB)
SMALLER = 8192  # for times: limits that suit the small size
LENGTHS = (512, 1024, 2048, 4096)
COLUMNS = ("attention", "memory_limit_gib", "seq", "median_ms", "peak_allocated_gib", "predicted_peak_gib", "note")


def full() -> list[RunConfig]:
    shapes = [AttentionShape(32, 32, seq, 64, causal=True) for seq in LENGTHS]
    return [c for limit in LIMITS for c in calls(shapes, memory_limit_bytes=limit, steps=5, warmup=2)]


def small() -> list[RunConfig]:
    """Return calls with few heads, which a CPU finishes, with proportionally smaller memory limits."""
    shapes = [AttentionShape(1, 4, seq, 64, causal=True) for seq in (128, 256)]
    return [c for limit in LIMITS for c in calls(shapes, memory_limit_bytes=limit // SMALLER, **QUICK)]


def needs(cells: list[Cell]) -> list[Row]:
    return [
        {
            "attention": cell["attention"],
            "seq": cell["seq"],
            "limit_bytes": cell["memory_limit_bytes"],
            "result": cell["status"],
            "predicted_bytes": cell["predicted_peak_bytes"],
            "score_matrix_bytes": score_matrix_bytes(cell),
            "failed_allocation_bytes": cell["failed_allocation_bytes"],
        }
        for cell in cells
        if cell["status"] in ("ok", "oom")
    ]


def score_matrix_bytes(cell: Cell) -> int:
    """Return the bytes of one (batch, heads, seq, seq) matrix in fp16."""
    return int(2 * cell["batch"] * cell["heads"] * cell["seq"] ** 2)


def tables(cells: list[Cell], format: str) -> list[str]:
    rows = needs(cells)
    return [
        render([cell.record for cell in cells], format, COLUMNS),
        *row_table(
            rows, "what was needed: by prediction, of it one score matrix, and the allocation that failed", format
        ),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    for limit in dict.fromkeys(cell["memory_limit_bytes"] for cell in cells):
        here = [cell for cell in cells if cell["memory_limit_bytes"] == limit]
        for name in dict.fromkeys(cell["attention"] for cell in here if cell["status"] in ("ok", "oom")):
            same = [cell for cell in here if cell["attention"] == name]
            fits = [cell["seq"] for cell in same if cell.measured]
            sentence = (
                f"{name} on {human(limit, 'bytes')}: fits at length {', '.join(map(str, fits)) or 'none of these'}"
            )
            failed = [cell for cell in same if cell["status"] == "oom"]
            if failed:
                asked = failed[0]["failed_allocation_bytes"]
                needed = human(failed[0]["predicted_peak_bytes"], "bytes")
                sentence += f", not at {failed[0]['seq']}, which is predicted to need {needed}"
                sentence += f" and failed at an allocation of {human(asked, 'bytes')}" if asked else ""
            notes.append(sentence)
    return [*notes, *_one_matrix_more(cells)]


def _one_matrix_more(cells: list[Cell]) -> list[str]:
    """Return sentences on how much memory an implementation needs that keeps one more score matrix."""
    notes = []
    for cell in by_backend(cells).get(PYTORCH, []):
        matrix, predicted, limit = score_matrix_bytes(cell), cell["predicted_peak_bytes"], cell["memory_limit_bytes"]
        if predicted <= limit < predicted + matrix:
            notes.append(
                f"{PYTORCH} fits {human(limit, 'bytes')} at length {cell['seq']} with {human(predicted, 'bytes')}; "
                f"one that holds one score matrix more ({human(matrix, 'bytes')}) would need "
                f"{human(predicted + matrix, 'bytes')}"
            )
    by = index(cells, "attention", "memory_limit_bytes", "seq")
    checked = [c for c in by.values() if c["peak_allocated_bytes"] and c["predicted_peak_bytes"]]
    if checked:
        off = max(abs(c["peak_allocated_bytes"] / c["predicted_peak_bytes"] - 1) for c in checked)
        notes.append(f"where it fits, the measured peak is within {off:.1%} of the predicted one")
    return notes


def on_the_larger_card(cell: Cell) -> bool:
    return cell["memory_limit_bytes"] in (max(LIMITS), max(LIMITS) // SMALLER)


def answer(cells: list[Cell]) -> str:
    notes = []
    for limit in dict.fromkeys(cell["memory_limit_bytes"] for cell in cells):
        here = [cell for cell in cells if cell["memory_limit_bytes"] == limit and cell["status"] in ("ok", "oom")]
        found = []
        for name in dict.fromkeys(cell["attention"] for cell in here):
            same = [cell for cell in here if cell["attention"] == name]
            longest = max((cell["seq"] for cell in same if cell.measured), default=None)
            failed = min((cell for cell in same if cell["status"] == "oom"), key=lambda cell: cell["seq"], default=None)
            text = f"{name} fits up to length {longest:,}" if longest else f"{name} fits at no length"
            if failed:
                needed = human(failed["predicted_peak_bytes"], "bytes")
                text += f" and needs {needed} at {failed['seq']:,} by prediction"
            found.append(text)
        if found:
            notes.append(f"within {human(limit, 'bytes')} {', '.join(found)}")
    return f"{place(cells)}, {'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "What does attention need that a card of 8 GB does not have?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="memory",
    drawn=on_the_larger_card,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
