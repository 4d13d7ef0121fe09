"""Memory of attention that holds the whole score matrix, up to the length that does not fit.

Question: at batch 8, over head sizes and lengths, how long do forward and backward take, what is in memory before
    backward and at its peak, and which cell runs out of it?
Method: naive attention, one head, fp32, d_head 16 … 128 × length 256 … 16384, forward and backward in one step, each
    timed; the peak next to the closed form, which says how many score matrices are alive when.
Output: times of one pass, peaks as measured and predicted; of what does not fit the allocation that failed.
Why: The memory that forward leaves is not the peak: backward holds the gradients of the weights and of the scores
    next to it, dP and dS, each as large as the scores.

    python scripts/studies/attention_memory.py
"""

from __future__ import annotations

from collections.abc import Sequence

from _attention import QUICK, calls
from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, Precision, RunConfig
from cs_systems.core.units import human
from cs_systems.formulas.cost import COMPUTE_BYTES, FULL_MATRIX_CUDA
from cs_systems.formulas.memory.attention import attention_memory
from cs_systems.record import Row
from cs_systems.report.tables.records import render

D_HEADS = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)
PASSES = 100
COLUMNS = (
    "d_head",
    "seq",
    "forward.median_ms",
    "backward.median_ms",
    "peak_allocated_mib",
    "note",
)


def full() -> list[RunConfig]:
    shapes = [AttentionShape(8, 1, seq, d) for d in D_HEADS for seq in LENGTHS]
    return calls(shapes, ("naive",), precision=Precision.FP32, steps=PASSES)


def small() -> list[RunConfig]:
    return calls([AttentionShape(8, 1, seq, 16) for seq in (128, 256)], ("naive",), precision=Precision.FP32, **QUICK)


def alive(cells: Sequence[Cell]) -> list[Row]:
    """Return the bytes at forward's peak, kept for backward, and at backward's peak, by the closed form."""
    rows = []
    for cell in cells:
        config = cell.record.run_config
        assert config.shape
        element = COMPUTE_BYTES[config.precision]
        matrix = config.shape.batch * config.shape.heads * config.shape.seq**2 * element
        on_cuda = cell.record.environment is not None and cell.record.environment.device != "cpu"
        prediction = attention_memory(config.shape, config.mode, element, FULL_MATRIX_CUDA, cuda=on_cuda)
        forward = prediction.instants["forward"]
        workspace = forward.get("cublas_workspaces", 0)
        rows.append(
            {
                "d_head": config.shape.d_head,
                "seq": config.shape.seq,
                "score_matrix_bytes": matrix,
                "forward_bytes": sum(forward.values()),
                "kept_bytes": sum(forward.values()) - matrix - workspace,
                "backward_bytes": prediction.peak_bytes,
                "measured_bytes": cell["peak_allocated_bytes"],
                "failed_allocation_bytes": cell["failed_allocation_bytes"],
                "result": cell["status"],
            }
        )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "alive by the closed form: at forward's peak, kept for backward, at backward's peak; measured; failed"
    return [render([c.record for c in cells], format, COLUMNS), *row_table(alive(cells), caption, format)]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    by = index(cells, "d_head", "seq")
    for d_head in dict.fromkeys(d for d, _ in by):
        lengths = [seq for d, seq in by if d == d_head]
        last = by[d_head, max(lengths)]
        forward, backward = last["forward.median_s"], last["backward.median_s"]
        if forward and backward:
            notes.append(
                f"d_head {d_head}, length {max(lengths)}: one pass takes {human(forward + backward, 's')}, backward "
                f"{backward / forward:.2f} times forward; {PASSES} passes would be printed as "
                f"{human(PASSES * (forward + backward), 's')}"
            )
    rows = [row for row in alive(cells) if row["measured_bytes"] and row["result"] == "ok"]
    if rows:
        off = [row["backward_bytes"] / row["measured_bytes"] - 1 for row in rows if row["seq"] >= 1024]
        largest = max(rows, key=lambda row: row["score_matrix_bytes"])
        matrix = largest["score_matrix_bytes"]
        notes.append(
            f"at length {largest['seq']} a score matrix takes {human(matrix, 'bytes')}; at the peak "
            f"{largest['measured_bytes'] / matrix:.1f} of them are alive, where forward alone keeps "
            f"{largest['kept_bytes'] / matrix:.1f}"
        )
        if off:
            notes.append(f"from length 1024 on the peak is predicted within {max(map(abs, off)):.1%}")
    for cell in cells:
        if cell["status"] == "oom":
            asked, needs = cell["failed_allocation_bytes"], cell["predicted_peak_bytes"]
            notes.append(
                f"d_head {cell['d_head']}, length {cell['seq']} ran out of memory"
                + (f" at an allocation of {human(asked, 'bytes')}" if asked else "")
                + (f"; it is predicted to need {human(needs, 'bytes')}" if needs else "")
            )
    return notes


def answer(cells: list[Cell]) -> str:
    rows = [row for row in alive(cells) if row["result"] == "ok"]
    if not rows:
        return ""
    largest = max(rows, key=lambda row: row["score_matrix_bytes"])
    peak, which = largest["measured_bytes"], ""
    if not peak:
        peak, which = largest["backward_bytes"], "predicted "
    matrix = largest["score_matrix_bytes"]
    failed = [row["seq"] for row in alive(cells) if row["result"] == "oom"]
    end = f"the shortest length that runs out of memory is {min(failed):,}" if failed else "every measured length fits"
    return (
        f"{place(cells)}, at length {largest['seq']:,} one score matrix takes {human(matrix, 'bytes')}, and the "
        f"{which}peak of forward and backward is {human(peak, 'bytes')}, {peak / matrix:.1f} times that; {end}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "What memory does attention over the whole score matrix take, and where does it end?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="memory",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
